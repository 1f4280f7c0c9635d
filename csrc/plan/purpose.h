// The purposes for which ranks exchange values.
#pragma once

namespace ds::plan {

// Calls of one purpose have one order on all ranks, calls of two may overlap: each purpose has communicators of its
// own. An engine opens those that it needs in this order.
enum class Purpose { kReduce, kExperts, kControl, kGather, kPipe, kPipeGrads, kTensor, kBlocks };

}  // namespace ds::plan
