// Files that end with the process that made them: buffers that rest on a drive.
//
// [Note: whose file is it]
// A file is locked (flock) by its process for as long as that lives, whatever ends it. A process that makes one in a
// folder also removes those of this user there that nobody has locked: they were left behind by a process that was
// killed. A file system without locks keeps all of them. That nobody but its run uses a folder is for its user to say
// (io/folders/run_folder.h).
#pragma once
#include <string>

#include "base/process.h"
#include "io/descriptor.h"

namespace ds::io {

// The folder `below` in `base`, made where it is missing, of this user alone (io/folders/own_folder.h): its first part
// has
// ".uid<number>" behind its name where another user has that. `base` is the user's, and is made with its parents where
// it is missing. Throws FileError that names `key`, which said so, where it is no folder, not writable or cannot be
// made.
std::string swap_folder(const std::string& key, const std::string& base, const std::string& below);

// Whether a file is called "*.tensor.swp" or "*.tensor.swp.<number>".
bool is_swap_name(const std::string& name);

// Removes the files of ended processes in a folder; returns how many there were.
int remove_leftovers(const std::string& folder);

class SwapFile {
 public:
  static constexpr const char* kSuffix = ".tensor.swp";

  // Makes an empty file in `folder`, which is there, whose name begins with `name`.
  SwapFile(const std::string& folder, const std::string& name);
  ~SwapFile() { remove(); }
  SwapFile(const SwapFile&) = delete;
  SwapFile& operator=(const SwapFile&) = delete;

  const std::string& path() const { return path_; }
  void remove() noexcept;  // its name goes now; who has it open goes on

 private:
  const OwningProcess owner_;
  std::string path_;
  Descriptor lock_;
};

}  // namespace ds::io
