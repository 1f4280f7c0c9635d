// Numbers of whole parameters that the passes of a step add up (optim::Rule::sums), and those that stay from step to
// step (Rule::kept).
#pragma once
#include <map>
#include <string>
#include <vector>

#include "optim/rule.h"
#include "zero/spaces/param_store.h"

namespace ds::zero {

// Numbers that the ranks have in common, by name.
using NamedNumbers = std::map<std::string, std::vector<double>>;

class ParameterSums {
 public:
  explicit ParameterSums(const ParamStore& store) : store_(store) {}

  void set_rules(const std::vector<const optim::Rule*>& rules);  // of all groups; forgets all numbers
  void begin();                                                  // of a step: zero, but for those that stay
  // Adds them up over the ranks that hold other elements of the same parameters.
  void add_up();
  // fp64, a row for each parameter of the engine, of the last step; undefined if no rule makes any.
  const at::Tensor& rows() const { return rows_; }

  NamedNumbers kept() const;
  void restore(const NamedNumbers& numbers);  // those that are missing start anew

 private:
  at::Tensor column(size_t kept) const;

  const ParamStore& store_;
  int64_t width_ = 0;
  std::vector<std::pair<std::string, double>> kept_;  // names and first values
  at::Tensor rows_;
  std::vector<at::Tensor> rows_of_sets_;  // of rows_, on its device: the parameters of each set of the store
};

}  // namespace ds::zero
