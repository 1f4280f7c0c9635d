// A folder in which a run keeps files for itself alone, until it ends.
//
// [Note: whose files they are]
// A run that is killed removes nothing. So each user of a folder holds a lock (flock) on a file of its own there, which
// the kernel gives up with the process, whatever ends it. A process that opens the folder looks at the lock files that
// it finds: one that nobody holds is of a dead run, and when there is no living one, whatever files that run has left
// are removed. The lock file's name says of which process it is: others of this process may use the folder, too (a
// second engine); another process that lives may not, and its files are never touched.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "base/process.h"
#include "io/descriptor.h"

namespace ds::io {

class RunFolder {
 public:
  // `folder` is made where only its last part is missing. `name`: of this user, one of several that share the folder (a
  // rank). `owned`: folders below `folder` whose files are the user's; none: those of swap files
  // (io/folders/swap_files.h), which look after themselves; `folder` stays. Throws FileError, and ErrorKind::kRuntime
  // where another process that lives uses them.
  RunFolder(const std::string& folder, const std::string& name, std::vector<std::string> owned);
  ~RunFolder() { close(); }
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  const std::string& folder() const { return folder_; }
  // Gives it up before the end: removes the lock file and its folders that are empty then.
  void close() noexcept;

 private:
  bool is_held(const Descriptor& folder, const std::string& file) const;
  void look_around(const Descriptor& folder) const;
  void remove_left_files(const Descriptor& folder) const;

  const std::string folder_, name_;
  const std::vector<std::string> owned_;
  const OwningProcess owner_;
  std::string lock_path_;
  Descriptor lock_;
};

}  // namespace ds::io
