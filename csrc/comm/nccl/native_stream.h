// The stream behind one of torch's, as kernel libraries and NCCL take it, without linking or including anything of
// CUDA.
#pragma once
#include <c10/core/Stream.h>

namespace ds::comm {

// Of a CUDA device a cudaStream_t (ErrorKind::kRuntime where this torch has no CUDA), of another one c10::Stream::id().
void* native_stream(c10::Stream stream);

}  // namespace ds::comm
