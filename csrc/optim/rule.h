// The description of an optimizer: its state slots, its hyperparameters and the kernel passes of a step.
// Each rule registers itself in a file of its own, optim/<name>.cpp; ZeRO, checkpoints and bindings see only this.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/table.h"

namespace ds::optim {

struct Hyperparameter {
  std::string name;  // "lr", "beta1"; booleans are 0 or 1
  double fallback;   // for callers that give none
};

// The values of the hyperparameters of one parameter group.
class Values {
 public:
  Values(const std::vector<Hyperparameter>& names, const double* values) : names_(names), values_(values) {}
  double operator[](const char* name) const;  // fails for a name that the rule has not

 private:
  const std::vector<Hyperparameter>& names_;
  const double* values_;
};

// Writes the block of constants of kernels for the `step`-th update of a parameter, from 1.
using WriteConstants = std::function<void(const Values&, double step, void* out)>;

// One walk over the segments by one update kernel.
struct Pass {
  std::string kernel;  // its name in KernelTable::find_update
  // Afterwards Rule::sums are added up over all ranks that hold parts of the same parameters; once in a step.
  bool adds_sums = false;
  // Afterwards the scratch of every parameter, as one matrix, is orthogonalised (zero/step/newton_schulz.h), with the
  // rule's hyperparameters ns_steps and gram.
  bool orthogonalises = false;
  // Afterwards the ranks exchange the scratch as signs (zero/step/compressed_step.h). The scratch lives until the next
  // pass has run.
  bool exchanges = false;
  // Afterwards the first of the sums, a sum of squares of each parameter, becomes Rule::scaling of the parameter, the
  // factor by which its root mean square would be the mean of those of all parameters.
  bool evens_out = false;
  // The constants of its kernel, where they are not those of the rule.
  size_t constants_bytes = 0;
  WriteConstants constants = nullptr;
};

// [Note: phases]
// A rule whose ranks exchange signs has several kinds of steps, its phases. The number of the update says which one a
// step has, so ranks agree without a word, and a run that is resumed goes on where it was. The phase also says, before
// the backward, whether gradients are added up over the ranks.
struct Phase {
  std::vector<Pass> passes;
  bool local = false;  // every rank steps with its own gradient; else with the mean over the ranks
  // Errors of exchanges and the buffers of Rule::beside start anew where a step has another period than the one before.
  int period = 0;
  bool beside = false;  // the passes use Rule::beside
  bool apart = false;   // after the step the ranks have different weights
  bool frozen = false;  // the variance stays as it is
};

// A buffer of one number for each element that no checkpoint has. It starts from zero, or from the weights.
struct Beside {
  std::string name;
  bool of_weights = false;
};

struct Rule {
  std::string name;
  std::vector<std::string> slots;  // names of the states, one number per element each, zero at first
  std::vector<Hyperparameter> hyper;
  std::vector<Pass> passes;
  size_t constants_bytes = 0;
  WriteConstants constants;  // the same for all passes that have none of their own
  // More than a loop over elements:
  int sums = 0;          // fp64 numbers for each whole parameter, zero before the first pass (UpdateSegment::sums)
  bool packed = false;   // states are not arrays of numbers ([Note: 8-bit states]): it cannot work in flat buffers
  bool scratch = false;  // an fp32 number for each element that lives from pass to pass (UpdateSegment::scratch)

  // The phases of a rule whose ranks exchange signs, see [Note: phases]. Empty: every step has `passes`; else those are
  // the passes of the first phase.
  std::vector<Phase> phases{};
  std::function<size_t(const Values&, int64_t update)> phase_of{};  // of an update, from 1
  std::vector<Beside> beside{};                                     // behind the slots in UpdateSegment::states
  // Names of the last ones of the sums, which stay from step to step, and the values they start from.
  std::vector<std::pair<std::string, double>> kept{};
  int scaling = -1;        // of the sums: see Pass::evens_out
  bool one_scale = false;  // what a bucket sends has one scale for all parameters

  bool orthogonalises() const {
    for (const Pass& pass : passes)
      if (pass.orthogonalises) return true;
    return false;
  }
  bool by_parameter() const { return sums > 0; }  // a segment must not span parameters
  bool compresses() const { return !phases.empty(); }
  const Phase* phase(const std::vector<double>& hyper, int64_t update) const;  // null: it has none
};

// The usual case: one pass, every element for itself. `constants(values, step)` returns the kernel's block.
template <class Constants>
Rule elementwise(std::string name, std::vector<std::string> slots, std::vector<Hyperparameter> hyper,
                 Constants (*constants)(const Values&, double step)) {
  Rule rule;
  rule.passes = {{name}};
  rule.name = std::move(name);
  rule.slots = std::move(slots);
  rule.hyper = std::move(hyper);
  rule.constants_bytes = sizeof(Constants);
  rule.constants = [constants](const Values& values, double step, void* out) {
    const Constants made = constants(values, step);
    std::memcpy(out, &made, sizeof made);
  };
  return rule;
}

// A pass with constants of its own.
template <class Constants>
Pass pass_with(std::string kernel, Constants (*constants)(const Values&, double step)) {
  Pass pass{std::move(kernel)};
  pass.constants_bytes = sizeof(Constants);
  pass.constants = [constants](const Values& values, double step, void* out) {
    const Constants made = constants(values, step);
    std::memcpy(out, &made, sizeof made);
  };
  return pass;
}

// At namespace scope in optim/<name>.cpp:  const Registration registration(elementwise<...>(...));
struct Registration {
  explicit Registration(Rule rule);
};

const std::vector<Rule>& rules();                // in no particular order; addresses stay
const Rule& find_rule(const std::string& name);  // fails, listing the names there are

// A pass of the rule over `segments`, which share hyperparameters (in the order of rule.hyper) and step count. `args`
// without its constants. Fails where this device has no such kernel.
void run_pass(const kernels::KernelTable& table, const kernels::Launch& launch, const Rule& rule, const Pass& pass,
              const std::vector<kernels::UpdateSegment>& segments, kernels::UpdateArgs args,
              const std::vector<double>& hyper, double step, const kernels::StepScale* scale);

}  // namespace ds::optim
