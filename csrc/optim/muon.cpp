// Muon: kernels/muon.h, and between the two passes the orthogonalisation of whole matrices.
#include "kernels/muon.h"

#include "config/sections/optimizer_params.h"
#include "optim/rule.h"

namespace ds::optim {
namespace {

kernels::MuonConstants constants(const Values& h, double) {
  return kernels::muon_constants({h["lr"], h["momentum"], h["weight_decay"], h["nesterov"] != 0});
}

Rule muon() {
  Rule rule = elementwise(
      "muon", {"momentum_buffer"},
      {{"lr", 0.02}, {"momentum", 0.95}, {"weight_decay", 0}, {"nesterov", 1}, {"ns_steps", 5}, {"gram", 1}},
      &constants);
  rule.passes = {{"muon_momentum"}, {"muon"}};
  rule.passes[0].orthogonalises = true;
  rule.scratch = true;
  return rule;
}

const Registration registration(muon());

using namespace config;
const OptimizerType type(
    "Muon",
    {number("lr", nullptr, "Learning rate. Unset: 0.02 for the parameters that Muon updates, 0.0003 for the others.")
         .at_least(0)
         .also(kPython),
     number("muon_lr", nullptr, "Learning rate of the parameters that Muon updates, instead of lr.").at_least(0),
     number("adam_lr", nullptr, "Learning rate of the others, instead of lr.").at_least(0),
     number("momentum", 0.95, "Momentum of the parameters that Muon updates.").at_least(0),
     text("ns_method", "gram",
          "Matrix that the Newton-Schulz iteration works on: the Gram matrix, or the matrix itself.")
         .one_of({"gram", "standard"}),
     list("betas", std::vector<double>{0.9, 0.95},
          "Decay of Adam's running averages of the gradient and of its square.")
         .items(kFloat),
     optimizer_field::eps(1e-10), optimizer_field::weight_decay(), optimizer_field::max_grad_norm()});

}  // namespace
}  // namespace ds::optim
