// Whether this machine lets tests use io_uring: containers often do not.
#pragma once
#include "folder.h"
#include "io/async_file.h"

namespace ds::io {

inline bool has_uring() {
  const Folder folder;
  Files files;
  bool direct = true;
  bool resizable = true;
  const Descriptor file = files.create(folder / "x", &direct, &resizable);
  return open_uring(files, file, folder / "x", 1) != nullptr;
}

}  // namespace ds::io
