// Results of some operations whose Meta kernel is written in Python, which would take most of the host's time.
#pragma once
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <string>

namespace standin {

// Meta tensors, as the Meta kernel would return them; nullopt: that is asked.
c10::optional<torch::jit::Stack> known_results(const std::string& name, const torch::jit::Stack& arguments);

}  // namespace standin
