# A build of the kernels, of their tests and of the rooms that these use (DS_ONLY_KERNELS). It needs a compiler and
# headers, so another processor's compiler can make it: tools/test_cpu.sh does for aarch64.
#
# A cross compiler may take files from this machine that hold for every processor: the headers of Highway and of
# nlohmann-json, and the sources of GoogleTest. They are reached through links, because the folder /usr/include as a
# whole has this machine's C library in it.
set(DS_GOOGLETEST /usr/src/googletest/googletest CACHE PATH "The sources of GoogleTest (Debian: googletest)")
foreach(folder hwy nlohmann)
  file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/headers)
  file(CREATE_LINK /usr/include/${folder} ${CMAKE_BINARY_DIR}/headers/${folder} SYMBOLIC)
endforeach()
include_directories(SYSTEM ${CMAKE_BINARY_DIR}/headers)
add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED)

# test_base, test_kernels and test_optim: the kernels of the table, of the optimizers, and what chooses between them.
function(ds_tests_of_kernels)
  enable_testing()
  include(GoogleTest)
  add_library(gtest_main STATIC ${DS_GOOGLETEST}/src/gtest-all.cc ${DS_GOOGLETEST}/src/gtest_main.cc)
  target_include_directories(gtest_main SYSTEM PUBLIC ${DS_GOOGLETEST}/include PRIVATE ${DS_GOOGLETEST})
  add_library(GTest::gtest_main ALIAS gtest_main)
  add_custom_target(tests)
  set(DS_BUILD_TESTS ON)
  foreach(room base kernels optim)
    ds_room_executables(${room})
  endforeach()
endfunction()
