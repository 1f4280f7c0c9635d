#include "zero/step/update_runs.h"

#include <iterator>

#include "base/ranges.h"

namespace ds::zero {

RunsByCount runs_by_count(const ParamSpace& space, const UpdateChoice& choice) {
  RunsByCount by_count;
  for (int32_t param : space.params)
    if (choice.used(param)) by_count[choice.steps[param]];
  for (auto found = by_count.begin(); found != by_count.end();) {
    std::vector<UpdateRun>& mine = found->second;
    mine = owned_runs(
        space,
        [&](size_t extent, size_t param) {
          return choice.used(param) && choice.steps[param] == found->first && (!choice.takes || choice.takes(extent));
        },
        choice.apart);
    const auto elsewhere = [&](const UpdateRun& run) { return choice.bucket >= 0 && run.bucket != choice.bucket; };
    erase_if(mine, elsewhere);
    found = mine.empty() ? by_count.erase(found) : std::next(found);
  }
  return by_count;
}

void update_runs(DeviceContext& context, const ParamSpace& space, const optim::Rule& rule, const optim::Pass& pass,
                 const RunsByCount& found, const UpdateRows& rows, const std::vector<double>& hyper,
                 const kernels::StepScale* scale) {
  kernels::UpdateArgs args;
  args.grad_dtype = kernel_dtype(rows.grad.dtype(), "gradient");
  args.lp_dtype = kernel_dtype(space.lp.dtype, "parameter");
  for (const auto& [count, runs] : found) {
    std::vector<kernels::UpdateSegment> segments;
    for (const UpdateRun& run : runs) {
      kernels::UpdateSegment segment;
      segment.master = rows.master.address(run.bucket, run.begin);
      for (size_t slot = 0; slot < rows.slots.size(); ++slot)
        segment.states[slot] = rows.slots[slot].address(run.bucket, run.begin);
      segment.grad = rows.grad.address(run.bucket, run.begin);
      segment.lp = rows.lp ? rows.lp.address(run.bucket, run.begin) : nullptr;
      segment.numel = static_cast<size_t>(run.end - run.begin);
      if (rows.scratch) segment.scratch = rows.scratch + run.begin - rows.origin;
      if (rows.sums) segment.sums = rows.sums + space.params[run.index] * rows.sums_width;
      segments.push_back(segment);
    }
    context.run_reserved([&, count = count](const kernels::Launch& launch) {
      optim::run_pass(context.table(), launch, rule, pass, segments, args, hyper, count + 1.0, scale);
    });
  }
}

}  // namespace ds::zero
