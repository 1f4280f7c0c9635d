// Parameters of the built-in optimizers, by type. Only what is written here, or registered by an optimizer's own file
// in csrc/optim, may stand in optimizer.params of these.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "config/field.h"

namespace ds::config {

// At namespace scope beside an optimizer's rule: its name in optimizer.type, and its parameters where
// optimizer_params.cpp has none of that name. A type that nobody registers is refused as not built.
struct OptimizerType {
  explicit OptimizerType(const char* name, std::vector<Field> params = {});
};

std::map<std::string, std::vector<Field>> optimizer_params();
std::vector<Literal> optimizer_types();            // all names
std::vector<Literal> optimizer_types_not_built();  // those of them that nobody registered

// Parameters that most optimizers have.
namespace optimizer_field {
Field lr(double fallback = 0.001);
Field betas();
Field eps(double fallback);
Field weight_decay();
Field fp32_states();
Field set_grad_none();
Field amsgrad();
// Known in order to be refused with a better message: see the rule in optimizer.cpp.
Field max_grad_norm();
}  // namespace optimizer_field

}  // namespace ds::config
