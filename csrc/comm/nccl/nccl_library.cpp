#include "comm/nccl/nccl_library.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/stat.h>

#include <cstdlib>
#include <utility>

#include "base/error.h"

namespace ds::comm {

namespace {

constexpr const char* kSoname = "libnccl.so.2";
constexpr int kOldest = 21400;

std::string path_of(void* handle, const std::string& asked) {
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || !map || !map->l_name || !*map->l_name) return asked;
  return map->l_name;
}

bool same_file(const std::string& one, const std::string& other) {
  struct stat a, b;
  return stat(one.c_str(), &a) == 0 && stat(other.c_str(), &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

bool exists(const std::string& path) {
  struct stat found;
  return stat(path.c_str(), &found) == 0;
}

void* load(const std::string& path, std::string& error) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  const char* text = handle ? nullptr : dlerror();
  if (!handle) error = text ? text : path + " cannot be opened";
  return handle;
}

std::string environment() {
  const char* text = std::getenv("DS_NCCL_LIBRARY");
  return text ? text : "";
}

template <typename Function>
bool resolve(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  return function != nullptr;
}

std::string as_text(int version) {
  // Up to 2.8 there was one digit for the minor version.
  const int major = version < 10000 ? version / 1000 : version / 10000;
  const int minor = (version < 10000 ? version % 1000 : version % 10000) / 100;
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(version % 100);
}

}  // namespace

NcclLibraryPtr NcclLibrary::find(const std::vector<std::string>& candidates) {
  const std::string wanted = environment();
  if (void* handle = dlopen(kSoname, RTLD_NOLOAD | RTLD_NOW)) {
    const std::string path = path_of(handle, kSoname);
    if (!wanted.empty() && !same_file(wanted, path))
      fail(ErrorKind::kValue, "DS_NCCL_LIBRARY names ", wanted, ", but this process has ", path,
           " already (torch loads its own), and two NCCLs in one process get into each other's way. Unset the variable "
           "to use the one that is there, or load the other one before the program starts: LD_PRELOAD=",
           wanted, ".");
    return NcclLibraryPtr(new NcclLibrary(handle, path));
  }
  if (!wanted.empty()) return open(wanted);
  for (const std::string& path : candidates)
    if (exists(path)) return open(path);
  std::string error;
  if (void* handle = load(kSoname, error)) return NcclLibraryPtr(new NcclLibrary(handle, path_of(handle, kSoname)));
  std::string tried;
  for (const std::string& path : candidates) tried += path + ", ";
  fail(ErrorKind::kRuntime, "NCCL is not to be found. Tried: one that is in this process already, ", tried,
       "and the system's (", error,
       "). Install it (`pip install nvidia-nccl-cu13`, or cu12, for the CUDA of the driver; ",
       "Debian and Ubuntu: libnccl2), or name the file: DS_NCCL_LIBRARY=/path/to/", kSoname, ".");
}

NcclLibraryPtr NcclLibrary::open(const std::string& path) {
  std::string error;
  void* handle = load(path, error);
  if (!handle)
    fail(ErrorKind::kRuntime, "NCCL cannot be opened from ", path, ": ", error,
         ". DS_NCCL_LIBRARY, or whoever names the file, must give the path of a ", kSoname,
         " for this machine; without it the one of torch, of the package nvidia-nccl or of the system is used.");
  return NcclLibraryPtr(new NcclLibrary(handle, path_of(handle, path)));
}

NcclLibrary::NcclLibrary(void* handle, std::string path) : path_(std::move(path)) {
  const auto refuse = [&](const char* name) {
    fail(ErrorKind::kRuntime, path_, version_ ? " is NCCL " + as_text(version_) + " and" : "", " has no ", name,
         ". NCCL 2.14 or later is needed: install a newer one (`pip install -U nvidia-nccl-cu13`, or cu12), or name "
         "another file with DS_NCCL_LIBRARY.");
  };
  if (!resolve(handle, "ncclGetVersion", calls_.get_version)) refuse("ncclGetVersion");
  if (calls_.get_version(&version_) != nccl::kSuccess) version_ = 0;
  const auto need = [&](const char* name, auto& function) {
    if (!resolve(handle, name, function)) refuse(name);
  };
  need("ncclGetUniqueId", calls_.get_unique_id);
  need("ncclGetErrorString", calls_.get_error_string);
  need("ncclGetLastError", calls_.get_last_error);
  need("ncclCommInitRankConfig", calls_.comm_init_rank_config);
  need("ncclCommGetAsyncError", calls_.comm_get_async_error);
  need("ncclCommFinalize", calls_.comm_finalize);
  need("ncclCommDestroy", calls_.comm_destroy);
  need("ncclCommAbort", calls_.comm_abort);
  need("ncclGroupStart", calls_.group_start);
  need("ncclGroupEnd", calls_.group_end);
  need("ncclAllReduce", calls_.all_reduce);
  need("ncclBroadcast", calls_.broadcast);
  need("ncclReduce", calls_.reduce);
  need("ncclAllGather", calls_.all_gather);
  need("ncclReduceScatter", calls_.reduce_scatter);
  need("ncclSend", calls_.send);
  need("ncclRecv", calls_.recv);
  if (version_ < kOldest) refuse("configuration of communicators that can be trusted");
  const auto want = [&](const char* name, auto& function) {
    if (!resolve(handle, name, function) && missing_buffer_call_.empty()) missing_buffer_call_ = name;
  };
  want("ncclMemAlloc", buffer_calls_.mem_alloc);
  want("ncclMemFree", buffer_calls_.mem_free);
  want("ncclCommRegister", buffer_calls_.comm_register);
  want("ncclCommDeregister", buffer_calls_.comm_deregister);
}

std::string NcclLibrary::version_text() const { return as_text(version_); }

std::string NcclLibrary::described() const { return "NCCL " + version_text() + " (" + path_ + ")"; }

const nccl::BufferCalls& NcclLibrary::buffer_calls() const {
  if (!has_buffers())
    fail(
        ErrorKind::kRuntime, path_, " is NCCL ", version_text(), " and has no ", missing_buffer_call_,
        ": registered user buffers need NCCL 2.19 or later. Install a newer one (`pip install -U nvidia-nccl-cu13`, or "
        "cu12), or name another file with DS_NCCL_LIBRARY; or use ordinary tensors, which need no registration.");
  return buffer_calls_;
}

nccl::UniqueId NcclLibrary::make_id() const {
  nccl::UniqueId id;
  const nccl::Result result = calls_.get_unique_id(&id);
  if (result != nccl::kSuccess)
    fail(ErrorKind::kRuntime, described(), " could not make the id of a communicator: ", explain(result));
  return id;
}

std::string NcclLibrary::explain(nccl::Result result, nccl::Comm comm) const {
  const char* name = calls_.get_error_string(result);
  std::string text = std::string(name ? name : "error") + " (code " + std::to_string(result) + ")";
  const char* last = calls_.get_last_error(comm);
  if (last && *last) text += "; NCCL says: " + std::string(last);
  return text;
}

}  // namespace ds::comm
