// Libraries that tests open instead of those of vendors. Included as "../stand_in.h" by the tests of any room.
#pragma once
#include <filesystem>
#include <string>

namespace ds {

// The path of the stand-in `name`. CMake's ds_stand_ins builds it into the folder of the test programs. The path is no
// definition of the compiler, because a file that is compiled in one checkout must equal that of another for ccache.
inline std::string stand_in(const std::string& name) {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / ("lib" + name + ".so");
}

}  // namespace ds
