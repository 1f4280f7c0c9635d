// The description of an optimizer: its state slots, its hyperparameters and the kernel passes of a step.
// Each rule registers itself in a file of its own, optim/<name>.cpp; ZeRO, checkpoints and bindings see only this.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kernels/table.h"

namespace ds::optim {

struct Hyperparameter {
  std::string name;  // "lr", "beta1"; booleans are 0 or 1
  double fallback;   // for callers that give none
};

// One walk over the segments by one update kernel.
struct Pass {
  std::string kernel;  // its name in KernelTable::find_update
  // Afterwards Rule::sums are added up over all ranks that hold parts of the same parameters; once in a step.
  bool adds_sums = false;
  // Afterwards the scratch of every parameter, as one matrix, is orthogonalised (zero/step/newton_schulz.h), with the
  // rule's hyperparameters ns_steps and gram.
  bool orthogonalises = false;
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

struct Rule {
  std::string name;
  std::vector<std::string> slots;  // names of the states, one number per element each, zero at first
  std::vector<Hyperparameter> hyper;
  std::vector<Pass> passes;
  size_t constants_bytes = 0;
  // Writes the kernels' block of constants (the same for all passes) for the `step`-th update of a parameter, from 1.
  std::function<void(const Values&, double step, void* out)> constants;
  // More than a loop over elements:
  int sums = 0;          // fp64 numbers for each whole parameter, zero before the first pass (UpdateSegment::sums)
  bool packed = false;   // states are not arrays of numbers ([Note: 8-bit states]): it cannot work in flat buffers
  bool scratch = false;  // an fp32 number for each element that lives from pass to pass (UpdateSegment::scratch)

  bool orthogonalises() const {
    for (const Pass& pass : passes)
      if (pass.orthogonalises) return true;
    return false;
  }
  bool by_parameter() const { return sums > 0; }  // a segment must not span parameters
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

// At namespace scope in optim/<name>.cpp:  const Registration registration(elementwise<...>(...));
struct Registration {
  explicit Registration(Rule rule);
};

const std::vector<Rule>& rules();                // in no particular order; addresses stay
const Rule& find_rule(const std::string& name);  // fails, listing the names there are

// Pass number `pass` over `segments`, which share hyperparameters (in the order of rule.hyper) and step count. `args`
// without its constants. Fails where this device has no such kernel.
void run_pass(const kernels::KernelTable& table, const kernels::Launch& launch, const Rule& rule, size_t pass,
              const std::vector<kernels::UpdateSegment>& segments, kernels::UpdateArgs args,
              const std::vector<double>& hyper, double step, const kernels::StepScale* scale);

}  // namespace ds::optim
