// Whether this machine lets tests use io_uring: containers often do not.
#pragma once
#include "folder.h"
#include "io/async/async_file.h"

namespace ds::io {

// The file `path`, new.
inline Descriptor created(Files& files, const std::string& path, bool direct = true) {
  bool resizable = true;
  return files.create(path, &direct, &resizable);
}

inline bool has_uring() {
  const Folder folder;
  Files files;
  const Descriptor file = created(files, folder / "x");
  return open_uring(files, file, folder / "x", 1) != nullptr;
}

}  // namespace ds::io
