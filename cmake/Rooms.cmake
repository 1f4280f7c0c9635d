# A room is one folder of csrc. Its OBJECT library sees the headers of exactly the rooms it names, so the calls
# below are the architecture's arrows: an #include that no arrow allows does not compile.
#
#   ds_room(kernels USES base)                  csrc/kernels/**/*.cpp
#   ds_room(zero USES base plan ... LIBS ds_torch UNITY 6)   compiled six files at a time
#
# UNITY: reading the headers of torch, pybind11 and nlohmann-json takes most of the time in these rooms, so several files are
# compiled as one, and the headers are read once for all of them. Rooms that see torch share its precompiled headers, too
# (ds_precompile). A change of one file compiles its neighbours again: to work on one for long, set DS_UNITY=0 (environment of
# `make`), as `make lint` does; then nothing is precompiled, so that a file names what it includes. Names in anonymous
# namespaces must differ within a room.
#
# Headers are included as "<room>/<header>.h". Every source in the folder belongs to the room: no list to edit.
#
# The links, and the files that include several others (UNITY), lie outside of the build folder. So the commands that
# compile a room without torch, and its tests, are the same for every torch, and ccache compiles them once for all torches.
set(DS_ROOMS ${CMAKE_SOURCE_DIR}/build/rooms)

# `out`: for each `batch` of the room's files one file that includes them.
function(ds_unity name batch sources out)
  set(made)
  list(LENGTH sources count)
  set(begin 0)
  while(begin LESS count)
    list(SUBLIST sources ${begin} ${batch} part)
    set(text)
    foreach(source ${part})
      file(RELATIVE_PATH path ${CMAKE_SOURCE_DIR}/csrc ${source})
      string(APPEND text "#include \"${path}\"\n")
    endforeach()
    set(file ${DS_ROOMS}/unity/${name}_${begin}.cpp)
    file(CONFIGURE OUTPUT ${file} CONTENT "${text}" @ONLY)  # writes only what differs
    list(APPEND made ${file})
    math(EXPR begin "${begin} + ${batch}")
  endwhile()
  set(${out} ${made} PARENT_SCOPE)
endfunction()

# Most of the time that a file of a room with torch takes to compile goes into the headers of torch. They are compiled once,
# in `owner`, a library that is made by the first call, and `target` reads the result. HEADERS: further ones. LIBS: libraries that
# decide how they are read. Targets of one owner are compiled with the same flags.
function(ds_precompile target owner)
  cmake_parse_arguments(WITH "" "" "HEADERS;LIBS" ${ARGN})
  if(NOT TARGET ${owner})
    file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/${owner}.cpp CONTENT "" @ONLY)
    add_library(${owner} OBJECT ${CMAKE_BINARY_DIR}/${owner}.cpp)
    target_link_libraries(${owner} PRIVATE ds_torch ${WITH_LIBS})
    target_precompile_headers(${owner} PRIVATE <algorithm> <condition_variable> <functional> <map> <memory> <mutex>
      <optional> <string> <thread> <unordered_map> <variant> <vector> <ATen/Functions.h> <ATen/TensorOperators.h>
      <c10/core/Event.h> <c10/core/impl/VirtualGuardImpl.h> <torch/csrc/distributed/c10d/ProcessGroup.hpp> ${WITH_HEADERS})
    target_compile_options(${owner} PRIVATE -fpch-preprocess)  # ccache asks for it
  endif()
  target_precompile_headers(${target} REUSE_FROM ${owner})
  target_compile_options(${target} PRIVATE -fpch-preprocess)
endfunction()

function(ds_room name)
  cmake_parse_arguments(ROOM "" "UNITY" "USES;LIBS" ${ARGN})
  set(root ${DS_ROOMS}/${name})
  file(MAKE_DIRECTORY ${root})
  if(NOT EXISTS ${root}/${name})  # another build may be reading it
    file(CREATE_LINK ${CMAKE_SOURCE_DIR}/csrc/${name} ${root}/${name} SYMBOLIC)
  endif()
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/${name}/*.cpp)
  if(ROOM_UNITY AND DS_UNITY)
    ds_unity(${name} ${ROOM_UNITY} "${sources}" sources)
  endif()
  add_library(ds_${name} OBJECT ${sources})
  set_target_properties(ds_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_include_directories(ds_${name} PRIVATE ${root})
  foreach(used ${ROOM_USES})
    target_include_directories(ds_${name} PRIVATE ${DS_ROOMS}/${used})
  endforeach()
  target_link_libraries(ds_${name} PRIVATE ${ROOM_LIBS})
  if("ds_torch" IN_LIST ROOM_LIBS AND DS_UNITY)
    ds_precompile(ds_${name} room_precompiled)
    set_target_properties(room_precompiled PROPERTIES POSITION_INDEPENDENT_CODE ON)
  endif()
  set_property(GLOBAL PROPERTY ds_uses_${name} ${name} ${ROOM_USES})
  set_property(GLOBAL PROPERTY ds_libs_${name} ${ROOM_LIBS})
endfunction()

# Everything an executable about room `name` may include and must link. `out_objects` are the object files of the
# room and of all rooms it uses, except kernels, which is a shared library of its own.
function(ds_room_closure name out_includes out_objects out_libs)
  get_property(used GLOBAL PROPERTY ds_uses_${name})
  get_property(libs GLOBAL PROPERTY ds_libs_${name})
  set(includes)
  set(objects)
  foreach(room ${used})
    list(APPEND includes ${DS_ROOMS}/${room})
    get_property(more GLOBAL PROPERTY ds_libs_${room})
    list(APPEND libs ${more})
    if(room STREQUAL kernels)
      list(APPEND libs ds_kernels_cpu)
    else()
      list(APPEND objects $<TARGET_OBJECTS:ds_${room}>)
    endif()
  endforeach()
  list(REMOVE_DUPLICATES libs)
  set(${out_includes} ${includes} PARENT_SCOPE)
  set(${out_objects} ${objects} PARENT_SCOPE)
  set(${out_libs} ${libs} PARENT_SCOPE)
endfunction()

set(DS_TEST_PARTS 4)

# Every DS_TEST_PARTS-th case of a GoogleTest program in one process (GoogleTest's own sharding).
function(ds_test_parts name target)
  math(EXPR last "${DS_TEST_PARTS} - 1")
  foreach(part RANGE ${last})
    math(EXPR number "${part} + 1")
    add_test(NAME ${name}.${number}of${DS_TEST_PARTS} COMMAND ${target})
    set_tests_properties(${name}.${number}of${DS_TEST_PARTS} PROPERTIES TIMEOUT 240 LABELS "${name};torch"
      ENVIRONMENT "GTEST_TOTAL_SHARDS=${DS_TEST_PARTS};GTEST_SHARD_INDEX=${part}")
  endforeach()
endfunction()

# Tests compute little themselves: the optimiser would take a sixth of the time of compiling them.
function(ds_compile_lightly target)
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
endfunction()

# tests/cpp/<room>/*.cpp -> test_<room> (GoogleTest; each case a ctest entry, or DS_TEST_PARTS entries where torch is linked:
# loading it takes longer than most cases);
# benchmarks/cpp/<room>/*.cpp -> bench_<room> (Google Benchmark).
function(ds_room_executables name)
  ds_room_closure(${name} includes objects libs)
  foreach(kind test bench)
    if(kind STREQUAL test)
      set(folder ${CMAKE_SOURCE_DIR}/tests/cpp/${name})
      set(framework GTest::gtest_main)
    else()
      set(folder ${CMAKE_SOURCE_DIR}/benchmarks/cpp/${name})
      set(framework benchmark::benchmark_main)
    endif()
    file(GLOB sources CONFIGURE_DEPENDS ${folder}/*.cpp)
    if(NOT sources OR (kind STREQUAL test AND NOT DS_BUILD_TESTS) OR (kind STREQUAL bench AND NOT DS_BUILD_BENCHMARKS))
      continue()
    endif()
    set(target ${kind}_${name})
    if(kind STREQUAL test AND "ds_torch" IN_LIST libs)
      list(APPEND sources ${CMAKE_SOURCE_DIR}/tests/cpp/standin_runs.cpp)
    endif()
    add_executable(${target} ${sources} ${objects})
    target_include_directories(${target} PRIVATE ${includes} ${folder})
    target_link_libraries(${target} PRIVATE ${libs} ${framework} Threads::Threads ${CMAKE_DL_LIBS})
    set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin
      BUILD_RPATH "${DS_LIB_DIR};${TORCH_ROOT}/lib" SKIP_BUILD_RPATH OFF)
    if("ds_torch" IN_LIST libs AND DS_UNITY)
      if(kind STREQUAL test)
        ds_precompile(${target} test_precompiled HEADERS <gtest/gtest.h> LIBS GTest::gtest)
        ds_compile_lightly(test_precompiled)
      else()  # with the flags of rooms, whose headers it reads
        target_compile_options(${target} PRIVATE -fPIC)
        ds_precompile(${target} room_precompiled)
      endif()
    endif()
    if(kind STREQUAL test)
      ds_compile_lightly(${target})
      if("ds_torch" IN_LIST libs)
        ds_test_parts(${name} ${target})
      else()
        gtest_discover_tests(${target} TEST_PREFIX ${name}. DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 120 LABELS ${name})
      endif()
      add_dependencies(tests ${target})
    else()
      add_dependencies(benchmarks ${target})
    endif()
  endforeach()
endfunction()
