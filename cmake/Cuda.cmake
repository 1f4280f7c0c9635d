# The CUDA bodies of csrc/kernels/cuda, as one shared library that depends on libc alone.
set(DS_CUDA_ENABLED OFF)
if(DS_BUILD_CUDA AND NOT DS_SANITIZE)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90)  # code for sm_80 and sm_90, and PTX 90 for what comes after
  endif()
  include(CheckLanguage)
  if(NOT DEFINED CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX} AND EXISTS /usr/local/cuda/bin/nvcc)
    set(CMAKE_CUDA_COMPILER /usr/local/cuda/bin/nvcc)
  endif()
  check_language(CUDA)
  file(GLOB cuda_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/kernels/cuda/*.cu)
  if(CMAKE_CUDA_COMPILER AND cuda_sources)
    enable_language(CUDA)
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    add_library(ds_kernels_cuda SHARED ${cuda_sources})
    set_target_properties(ds_kernels_cuda PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${DS_LIB_DIR} CUDA_STANDARD 17
      POSITION_INDEPENDENT_CODE ON CUDA_VISIBILITY_PRESET hidden)
    target_include_directories(ds_kernels_cuda PRIVATE ${CMAKE_BINARY_DIR}/rooms/base ${CMAKE_BINARY_DIR}/rooms/kernels)
    # As on the CPU: no fused multiply-add, so that both give the same bits; the kernels wait for memory anyway.
    target_compile_options(ds_kernels_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false>)
    target_link_options(ds_kernels_cuda PRIVATE -static-libstdc++ -static-libgcc
      -Wl,--version-script=${CMAKE_SOURCE_DIR}/cmake/kernels.map)
    set_target_properties(ds_kernels_cuda PROPERTIES LINK_DEPENDS ${CMAKE_SOURCE_DIR}/cmake/kernels.map)
    set(DS_CUDA_ENABLED ON)
  else()
    message(STATUS "no CUDA compiler found: CPU kernels only")
  endif()
endif()
