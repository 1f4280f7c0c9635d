#include "io/async/cufile.h"

#include <errno.h>
#include <gtest/gtest.h>

#include "../error_of.h"
#include "../stand_in.h"
#include "base/error.h"
#include "folder.h"
#include "io/file_error.h"

namespace ds::io {
namespace {

std::string refusal(const std::string& library) {
  return error_of([&] { CuFile::open(library); });
}

TEST(CuFile, MovesBytesInPiecesOfItsOwn) {
  const Folder folder;
  const auto library = CuFile::open(stand_in("fake_cufile"));
  const std::string text = random_bytes((3 << 20) + 5);
  {
    const CuFile::File file(*library, folder / "x", true);
    file.write(text.data(), 0, text.size(), 0);
    file.write(text.data(), 10, 100, 50);
  }
  std::string wanted = text;
  wanted.replace(50, 100, text, 10, 100);
  EXPECT_EQ(content(folder / "x") == wanted, true);
  const CuFile::File file(*library, folder / "x", false);
  std::string back(text.size(), 0);
  file.read(back.data(), 0, 1 << 20, 0);
  file.read(back.data(), 1 << 20, text.size() - (1 << 20), 1 << 20);
  EXPECT_EQ(back == wanted, true);
  EXPECT_EQ(thrown<FileError>([&] { file.read(back.data(), 0, 100, text.size() - 50); }).code(), ENODATA);
  library->add(text.data(), text.size());
  library->remove(text.data());
  EXPECT_THROW(library->add(text.data(), 0), Error);
  EXPECT_THROW(CuFile::File(*library, folder / "none/x", true), FileError);
}

TEST(CuFile, SaysWhyItCannotBeUsed) {
  EXPECT_TRUE(says(refusal("/none/libcufile.so"), "GPUDirect storage cannot be used: /none/libcufile.so"));
  EXPECT_TRUE(
      says(refusal(stand_in("fake_cufile_no_driver")), "cuFileDriverOpen gave cuFile error 5001, CUDA error 100"));
  EXPECT_TRUE(says(refusal(stand_in("fake_cufile_broken")), "has no function cuFileWrite"));
}

}  // namespace
}  // namespace ds::io
