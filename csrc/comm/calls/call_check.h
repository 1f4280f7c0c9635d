// Checks of a call that one rank can make before anything is sent: missing tensors, dtypes, devices, strides,
// numbers of elements, counts and ranks. Communicator::run asks for every verb and transport; run_call asks for the
// lists of tensors that scripts and torch hand over.
#pragma once
#include "comm/calls/list_calls.h"
#include "comm/calls/op.h"

namespace ds::comm {

// Throws kValue, or kType where dtypes do not fit together.
void check_call(const Op& op, int rank, int size);
// The same for tensors of any strides.
void check_call(const ListCall& call, int rank, int size);

}  // namespace ds::comm
