// libnccl.so.2, found and opened when it is first asked for: never by an import, never by the linker.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "comm/nccl/nccl_api.h"

namespace ds::comm {

class NcclLibrary;
using NcclLibraryPtr = std::shared_ptr<const NcclLibrary>;

// A handle. The library itself stays in the process for good: it has threads, and torch may use it. Any thread.
class NcclLibrary {
 public:
  // The NCCL of this process: the one that is in it already (torch's, as a rule), so that there are never two; else the
  // file that DS_NCCL_LIBRARY names; else the first of `candidates` that exists; else the system's. Where another one
  // is in the process, a DS_NCCL_LIBRARY is refused. kRuntime, with all that was tried, if there is none; also if it
  // lacks what 2.14 has.
  static NcclLibraryPtr find(const std::vector<std::string>& candidates = {});
  // This file and no other.
  static NcclLibraryPtr open(const std::string& path);

  const std::string& path() const { return path_; }
  int version() const { return version_; }  // 22809 is 2.28.9
  std::string version_text() const;
  const nccl::Calls& calls() const { return calls_; }
  bool has_buffers() const { return missing_buffer_call_.empty(); }
  const nccl::BufferCalls& buffer_calls() const;  // kRuntime where the library is older than 2.19
  bool has_float8() const { return version_ >= 22400; }

  nccl::UniqueId make_id() const;
  // "unhandled cuda error (1)", and what the library says of the last error, where it does.
  std::string explain(nccl::Result result, nccl::Comm comm = nullptr) const;
  std::string described() const;  // NCCL 2.28.9 (/usr/lib/.../libnccl.so.2)

 private:
  NcclLibrary(void* handle, std::string path);

  std::string path_;
  int version_ = 0;
  nccl::Calls calls_;
  nccl::BufferCalls buffer_calls_;
  std::string missing_buffer_call_;
};

}  // namespace ds::comm
