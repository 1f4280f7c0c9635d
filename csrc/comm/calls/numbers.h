// Numbers that the hosts of ranks tell each other: tensors in host memory, which travel as
// Communicator::device_for_numbers says. Results are in host memory when a call returns.
#pragma once
#include "comm/communicator.h"

namespace ds::comm {

// `numbers` become their sum over the ranks. `computes`: the device of the tensors that the caller computes with.
void sum_numbers(Communicator& ranks, const at::Tensor& numbers, const c10::Device& computes, Communicator::Tag tag);

// Returns the `own` of all ranks, one row for each.
at::Tensor gather_numbers(Communicator& ranks, const at::Tensor& own, const c10::Device& computes,
                          Communicator::Tag tag);

}  // namespace ds::comm
