// Functions that the host's compiler and nvcc's device code share.
#pragma once

#if defined(__CUDACC__)
#define DS_HOST_DEVICE __host__ __device__
#else
#define DS_HOST_DEVICE
#endif
