// The CUDA stream behind one of torch's, without linking or including anything of CUDA.
#pragma once
#include <c10/core/Stream.h>

namespace ds::comm {

void* native_stream(c10::Stream stream);  // a cudaStream_t; kRuntime where this torch has no CUDA

}  // namespace ds::comm
