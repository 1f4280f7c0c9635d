#include "config/sections/optimizer_params.h"

#include "base/ranges.h"

namespace ds::config {

namespace optimizer_field {

Field lr(double fallback) { return number("lr", fallback, "Learning rate.").at_least(0).also(kPython); }
Field betas() {
  return list("betas", std::vector<double>{0.9, 0.999},
              "Decay of the running averages of the gradient and of its square.")
      .items(kFloat)
      .items_at_least(0)
      .items_below(1)
      .exactly(2);
}
Field eps(double fallback) { return number("eps", fallback, "Added to the denominator.").at_least(0); }
Field weight_decay() { return number("weight_decay", 0.0, "Weight decay.").at_least(0); }
Field amsgrad() { return boolean("amsgrad", false, "The AMSGrad variant."); }
Field fp32_states() {
  return boolean("fp32_optimizer_states", true, "Keep the states in fp32 when parameters are not (CPU optimizer).");
}
Field set_grad_none() {
  return boolean("set_grad_none", true, "Free gradients instead of zeroing them (GPU optimizer).");
}
Field max_grad_norm() { return number("max_grad_norm", 0.0, "Use gradient_clipping instead."); }

}  // namespace optimizer_field

namespace {

using namespace optimizer_field;
using Fields = std::vector<Field>;

Fields operator+(Fields a, const Fields& b) {
  append(a, b);
  return a;
}

Field bias_correction() { return boolean("bias_correction", true, "Correct the averages for their start at zero."); }
Field onebit_bias_correction() {
  return boolean("bias_correction", false,
                 "Correct the averages for their start at zero. The published class ignores it, so it is off unless it "
                 "is written.");
}
Field eps_inside_sqrt() { return boolean("eps_inside_sqrt", false, "Add eps under the root."); }

struct Registered {
  std::string name;
  Fields params;
};

// Filled while the library is loaded, read-only afterwards.
std::vector<Registered>& registered() {
  static std::vector<Registered> all;
  return all;
}

Fields adam() {
  return {lr(),
          betas(),
          eps(1e-8),
          weight_decay(),
          bias_correction(),
          amsgrad(),
          fp32_states(),
          set_grad_none(),
          max_grad_norm(),
          boolean("torch_adam", false, "Use torch.optim instead of the fused implementation.").true_for_any_text(),
          boolean("adam_w_mode", true, "Decoupled weight decay (AdamW) rather than L2.").alias("adamw_mode"),
          boolean("foreach", false, "With torch_adam: torch's multi-tensor form.").or_null(),
          boolean("fused", false, "With torch_adam: torch's fused form.").or_null(),
          boolean("maximize", false, "With torch_adam: go uphill."),
          boolean("capturable", false, "With torch_adam: safe to capture in a CUDA graph."),
          boolean("differentiable", false, "With torch_adam: autograd through the step.")};
}

Fields lamb_bounds() {
  return {number("max_coeff", 10.0, "Largest trust ratio."), number("min_coeff", 0.01, "Smallest trust ratio.")};
}

Fields lamb() {
  return Fields{lr(),      betas(),           eps(1e-8),      weight_decay(), bias_correction(),
                amsgrad(), eps_inside_sqrt(), max_grad_norm()} +
         lamb_bounds();
}

Fields onebit() {
  return {
      boolean("cuda_aware", false, "With comm_backend_name \"mpi\": the MPI library takes device memory."),
      text("comm_backend_name", "nccl",
           "Transport of the signs: \"nccl\", \"hccl\" and \"compressed\" are the one that the engine has, \"mpi\" is "
           "mpi4py.")
          .one_of({"nccl", "hccl", "compressed", "mpi"})};
}

Field freeze_step() {
  return integer("freeze_step", 100000,
                 "Steps of warm-up before compression starts. \"auto\": until the norm of the variance has changed by "
                 "less than 4 % over 1 / (1 - beta2) steps.")
      .also(kText)
      .one_of({"auto"})
      .at_least(0);
}

}  // namespace

std::map<std::string, std::vector<Field>> optimizer_params() {
  std::map<std::string, Fields> out;
  out["Adam"] = out["AdamW"] = adam();
  out["Lamb"] = lamb();
  const Fields adams = {lr(),      betas(),           eps(1e-8),      weight_decay(), onebit_bias_correction(),
                        amsgrad(), eps_inside_sqrt(), max_grad_norm()};
  out["OneBitAdam"] = adams + Fields{freeze_step()} + onebit();
  out["OneBitLamb"] = adams + lamb_bounds() + onebit() +
                      Fields{freeze_step(), number("coeff_beta", 0.9, "Decay of the running trust ratio."),
                             number("factor_max", 4.0, "Largest scaling of the frozen ratio."),
                             number("factor_min", 0.5, "Smallest scaling of the frozen ratio."),
                             number("factor_threshold", 0.1, "Largest change of the scaling between steps.")};
  out["ZeroOneAdam"] =
      adams +
      Fields{integer("var_freeze_step", 100000, "Step after which the variance stays as it is.").at_least(0),
             integer("var_update_scaler", 16, "Number of updates of the variance until their interval doubles.")
                 .at_least(1),
             integer("local_step_scaler", 32678, "Number of local steps until the interval of communication doubles.")
                 .at_least(1),
             integer("local_step_clipper", 16, "Largest interval between communications, in steps.").at_least(1)} +
      onebit();
  for (const Registered& type : registered())
    if (!type.params.empty()) out[type.name] = type.params;
  return out;
}

OptimizerType::OptimizerType(const char* name, std::vector<Field> params) {
  registered().push_back({name, std::move(params)});
}

std::vector<Literal> optimizer_types() {
  std::vector<std::string> names = {"Adam",       "AdamW", "Adagrad", "Lamb",   "OneBitAdam", "ZeroOneAdam",
                                    "OneBitLamb", "Lion",  "Muon",    "MuAdam", "MuAdamW",    "MuSGD"};
  for (const Registered& type : registered())
    if (!contains(names, type.name)) names.push_back(type.name);
  return {names.begin(), names.end()};
}

std::vector<Literal> optimizer_types_not_built() {
  std::vector<Literal> missing;
  for (const Literal& type : optimizer_types()) {
    const auto& name = std::get<std::string>(type.value);
    const bool here = any_of(registered(), [&](const Registered& one) { return one.name == name; });
    if (!here && name != "Adam" && name != "AdamW") missing.push_back(type);
  }
  return missing;
}

}  // namespace ds::config
