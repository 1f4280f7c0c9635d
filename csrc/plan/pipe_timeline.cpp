// Renders a plan over time: as text, and by slots of equal length.
#include <algorithm>
#include <cctype>
#include <cmath>

#include "base/error.h"
#include "plan/pipe_cost.h"

namespace ds::plan {

std::string pipe_timeline(const PipePlan& plan, const PipeCost& cost, int width) {
  if (width < 1) fail(ErrorKind::kValue, "a timeline has at least one column, not ", width);
  constexpr char kLetters[] = {'F', 'B', 'I', 'W'};
  std::string out;
  const double column = cost.seconds > 0 ? cost.seconds / width : 1;
  for (size_t rank = 0; rank < plan.ranks.size(); ++rank) {
    std::string line(static_cast<size_t>(width), '.');
    for (size_t step = 0; step < plan.ranks[rank].size(); ++step) {
      const PipeAct& act = plan.ranks[rank][step];
      if (!computes(act.op)) continue;
      const PipeSpan& span = cost.ranks[rank].acts[step];
      const int from = static_cast<int>(std::floor(span.start / column + 1e-6));
      const int to = std::min(width, static_cast<int>(std::floor(span.end / column + 1e-6)));
      std::string word = kLetters[static_cast<int>(act.op)] + std::to_string(act.micro);
      if (act.chunk % 2 == 1) word[0] = static_cast<char>(std::tolower(word[0]));
      for (int i = from; i < to; ++i) line[i] = static_cast<size_t>(i - from) < word.size() ? word[i - from] : '-';
    }
    const std::string name = std::to_string(rank), last = std::to_string(plan.ranks.size() - 1);
    out += "stage " + std::string(last.size() - name.size(), ' ') + name + " |" + line + "|\n";
  }
  return out;
}

std::vector<std::vector<PipeAct>> pipe_slots(const PipePlan& plan, int rank) {
  if (rank < 0 || rank >= plan.shape.stages)
    fail(ErrorKind::kIndex, "there is no stage ", rank, ": the pipeline has ", plan.shape.stages);
  const PipeCost cost = pipe_cost(plan, equal_costs(plan), plan.shape.micro_batches * plan.shape.chunks);
  std::vector<std::vector<PipeAct>> slots(static_cast<size_t>(std::llround(cost.seconds)));
  const auto& acts = plan.ranks[rank];
  const auto slot_of = [&](size_t step) {
    return static_cast<size_t>(std::llround(cost.ranks[rank].acts[step].start));
  };
  size_t sends_in = 0;
  for (size_t step = 0; step < acts.size(); ++step) {
    size_t slot = sends_in;
    if (computes(acts[step].op)) {
      slot = slot_of(step);
      sends_in = slot + 1;
    } else if (receives(acts[step].op)) {
      size_t next = step;
      while (next < acts.size() && !computes(acts[next].op)) ++next;
      if (next < acts.size()) slot = slot_of(next);
    }
    if (slot >= slots.size()) slots.resize(slot + 1);
    slots[slot].push_back(acts[step]);
  }
  return slots;
}

}  // namespace ds::plan
