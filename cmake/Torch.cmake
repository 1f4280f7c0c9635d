# The torch that ${Python_EXECUTABLE} imports, as one INTERFACE target `ds_torch`.
#
# find_package(Torch) is not used: against a PyPI torch it demands the CUDA toolkit, and where Debian's
# libtorch-dev is installed it silently picks that one. The interpreter knows best which torch it has.
execute_process(COMMAND ${Python_EXECUTABLE} -c [[
import os, torch
root = os.path.dirname(os.path.abspath(torch.__file__))
defs = ["_GLIBCXX_USE_CXX11_ABI=%d" % torch._C._GLIBCXX_USE_CXX11_ABI]
for key in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):  # the id of torch's pybind11 internals; gone in late 2.x
    value = getattr(torch._C, "_PYBIND11_" + key, None)
    if value:
        defs.append('PYBIND11_%s="%s"' % (key, value))
print(";".join([root, torch.__version__.split("+")[0], torch.version.cuda or "none"] + defs))
]] OUTPUT_VARIABLE _torch OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
list(GET _torch 0 TORCH_ROOT)
list(GET _torch 1 TORCH_VERSION)
list(GET _torch 2 TORCH_CUDA)
list(SUBLIST _torch 3 -1 TORCH_DEFS)
if(TORCH_VERSION VERSION_LESS 1.13)
  message(FATAL_ERROR "deepspeed needs torch 1.13 or newer; ${Python_EXECUTABLE} has ${TORCH_VERSION}: pip install "
    "'torch>=1.13'")
endif()

add_library(ds_torch INTERFACE)
target_include_directories(ds_torch SYSTEM INTERFACE
  ${TORCH_ROOT}/include ${TORCH_ROOT}/include/torch/csrc/api/include)
# NDEBUG: torch's headers check the inputs of observed operators unless they are read as torch itself was compiled.
target_compile_definitions(ds_torch INTERFACE ${TORCH_DEFS} NDEBUG)
# From 2.14 on torch's headers are written in C++20. Rooms that do not see torch stay as they are for all torches.
if(TORCH_VERSION VERSION_GREATER_EQUAL 2.14)
  target_compile_features(ds_torch INTERFACE cxx_std_20)
endif()
target_link_libraries(ds_torch INTERFACE ${TORCH_ROOT}/lib/libc10.so ${TORCH_ROOT}/lib/libtorch_cpu.so)
# torch's CUDA builds pull in libraries that only `import torch` knows how to find: leave them to it.
target_link_options(ds_torch INTERFACE -Wl,--allow-shlib-undefined)

# Bindings additionally need Python, libtorch_python and the pybind11 that torch itself was built with:
# another one compiles, but tensors and process groups then have no casters at run time.
add_library(ds_pybind INTERFACE)
if(EXISTS ${TORCH_ROOT}/include/pybind11/pybind11.h)
  target_include_directories(ds_pybind SYSTEM INTERFACE ${TORCH_ROOT}/include)
else()
  find_package(pybind11 CONFIG REQUIRED)
  target_include_directories(ds_pybind SYSTEM INTERFACE ${pybind11_INCLUDE_DIRS})
endif()
target_include_directories(ds_pybind SYSTEM INTERFACE ${Python_INCLUDE_DIRS})
target_compile_definitions(ds_pybind INTERFACE ${TORCH_DEFS})

add_library(ds_torch_python INTERFACE)
target_link_libraries(ds_torch_python INTERFACE ds_torch ds_pybind ${TORCH_ROOT}/lib/libtorch_python.so)
message(STATUS "torch ${TORCH_VERSION} at ${TORCH_ROOT}, built for CUDA: ${TORCH_CUDA}")
