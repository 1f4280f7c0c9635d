#include "optim/rule.h"

#include "base/error.h"

namespace ds::optim {
namespace {

std::vector<Rule>& registered() {
  static std::vector<Rule> all;  // filled while the program is loaded, constant afterwards
  return all;
}

}  // namespace

double Values::operator[](const char* name) const {
  for (size_t i = 0; i < names_.size(); ++i)
    if (names_[i].name == name) return values_[i];
  fail(ErrorKind::kKey, "this optimizer has no hyperparameter '", name, "'");
}

Registration::Registration(Rule rule) { registered().push_back(std::move(rule)); }

const std::vector<Rule>& rules() { return registered(); }

const Rule& find_rule(const std::string& name) {
  std::string known;
  for (const Rule& rule : rules()) {
    if (rule.name == name) return rule;
    known += (known.empty() ? "" : ", ") + rule.name;
  }
  fail(ErrorKind::kValue, "there is no native optimizer '", name, "'; there are: ", known);
}

const Phase* Rule::phase(const std::vector<double>& hyper_values, int64_t update) const {
  return phases.empty() ? nullptr : &phases.at(phase_of(Values(hyper, hyper_values.data()), update));
}

void run_pass(const kernels::KernelTable& table, const kernels::Launch& launch, const Rule& rule, const Pass& pass,
              const std::vector<kernels::UpdateSegment>& segments, kernels::UpdateArgs args,
              const std::vector<double>& hyper, double step, const kernels::StepScale* scale) {
  const std::string& name = pass.kernel;
  const size_t bytes = pass.constants ? pass.constants_bytes : rule.constants_bytes;
  const kernels::UpdateKernel* kernel = table.find_update(name.c_str());
  if (kernel == nullptr)
    fail(ErrorKind::kRuntime, "there is no ", table.device, " kernel '", name, "' for the optimizer '", rule.name,
         "': use it on another device");
  if (kernel->constants_bytes != bytes || kernel->states > static_cast<int>(rule.slots.size() + rule.beside.size()))
    fail(ErrorKind::kRuntime, "the ", table.device, " kernel '", name, "' is of another version than the optimizer '",
         rule.name, "': build both again from one source tree (`make`)");
  std::vector<double> block((bytes + sizeof(double) - 1) / sizeof(double) + 1);
  (pass.constants ? pass.constants : rule.constants)(Values(rule.hyper, hyper.data()), step, block.data());
  args.constants = block.data();
  table.update(launch, *kernel, segments.data(), segments.size(), args, scale);
}

}  // namespace ds::optim
