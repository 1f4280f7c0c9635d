# libds_kernels_cuda_on_cpu.so: the CUDA bodies of csrc/kernels/cuda, compiled by the host's compiler with the headers of
# tests/cpp/kernels/cuda_on_cpu, for tests. DS_CUDA_KERNELS=<its path> makes a program use it as its CUDA library.
find_library(BOOST_CONTEXT boost_context)
find_path(BOOST_CONTEXT_INCLUDE boost/context/detail/fcontext.hpp)
if(NOT BOOST_CONTEXT OR NOT BOOST_CONTEXT_INCLUDE)
  message(FATAL_ERROR "the tests need Boost.Context (Debian: libboost-context-dev, which tools/packages.sh test installs)")
endif()
set(on_cpu ${CMAKE_SOURCE_DIR}/tests/cpp/kernels/cuda_on_cpu)
# Without a sanitizer the compiler puts a call before each access of a kernel, and the machine defines what is called.
set(on_cpu_options -Wno-unknown-pragmas -Wno-sign-compare -Wno-maybe-uninitialized -ffp-contract=off -g1)
if(NOT DS_SANITIZE)
  list(APPEND on_cpu_options -fsanitize=thread --param=tsan-instrument-func-entry-exit=0)
endif()

file(GLOB on_cpu_machine CONFIGURE_DEPENDS ${on_cpu}/*.cpp)
add_library(cuda_on_cpu_machine OBJECT ${on_cpu_machine})
target_include_directories(cuda_on_cpu_machine PRIVATE ${on_cpu} ${DS_ROOMS}/base)
# It switches stacks below the thread sanitizer, which must not follow it.
target_compile_options(cuda_on_cpu_machine PRIVATE -fno-sanitize=thread,undefined)
set(on_cpu_defined)
if(DS_SANITIZE MATCHES "address")
  set(on_cpu_defined CUDA_ON_CPU_ADDRESS)
elseif(DS_SANITIZE MATCHES "thread")
  set(on_cpu_defined CUDA_ON_CPU_THREAD)
endif()
target_compile_definitions(cuda_on_cpu_machine PRIVATE ${on_cpu_defined})
set_target_properties(cuda_on_cpu_machine PROPERTIES POSITION_INDEPENDENT_CODE ON)

function(ds_cuda_on_cpu target)
  add_library(${target} MODULE ${ARGN} $<TARGET_OBJECTS:cuda_on_cpu_machine>)
  target_include_directories(${target} PRIVATE ${on_cpu} ${DS_ROOMS}/base ${DS_ROOMS}/kernels)
  target_compile_options(${target} PRIVATE ${on_cpu_options})
  target_compile_definitions(${target} PRIVATE "DS_CUDA_TARGETS=\"CPU\"")
  target_link_libraries(${target} PRIVATE ${BOOST_CONTEXT} Threads::Threads ${CMAKE_DL_LIBS})
  target_link_options(${target} PRIVATE -Wl,--no-undefined -Wl,--version-script=${CMAKE_SOURCE_DIR}/cmake/kernels.map)
  set_target_properties(${target} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin
    LINK_DEPENDS ${CMAKE_SOURCE_DIR}/cmake/kernels.map)
endfunction()

file(GLOB on_cpu_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/kernels/cuda/*.cu)
ds_unity(cuda_on_cpu 1 "${on_cpu_sources}" on_cpu_sources)  # as .cpp: for CMake the .cu files are nvcc's
ds_cuda_on_cpu(ds_kernels_cuda_on_cpu ${on_cpu_sources})
file(CONFIGURE OUTPUT ${DS_ROOMS}/unity/planted_faults.cpp CONTENT "#include \"planted_faults.cu\"\n" @ONLY)
ds_cuda_on_cpu(planted_faults ${DS_ROOMS}/unity/planted_faults.cpp)
target_include_directories(planted_faults PRIVATE ${CMAKE_SOURCE_DIR}/tests/cpp/kernels)
add_dependencies(test_kernels planted_faults)
foreach(room kernels optim)
  add_dependencies(test_${room} ds_kernels_cuda_on_cpu)
  add_test(NAME ${room}.cuda_on_cpu COMMAND test_${room} --gtest_filter=Cuda*)
  set_tests_properties(${room}.cuda_on_cpu PROPERTIES TIMEOUT 600 LABELS ${room}
    ENVIRONMENT "DS_CUDA_KERNELS=$<TARGET_FILE:ds_kernels_cuda_on_cpu>")
endforeach()
