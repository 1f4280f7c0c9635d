// The stream behind one of torch's, as kernel libraries and NCCL take it, without linking or including anything of
// CUDA.
#pragma once
#include <c10/core/Stream.h>

namespace ds::comm {

// Returns the cudaStream_t of a CUDA device (ErrorKind::kRuntime where this torch has no CUDA), c10::Stream::id() of
// another.
void* native_stream(c10::Stream stream);

}  // namespace ds::comm
