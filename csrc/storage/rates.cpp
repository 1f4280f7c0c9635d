#include "storage/rates.h"

#include <ATen/Functions.h>
#include <errno.h>
#include <fcntl.h>
#include <pwd.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/ranges.h"
#include "io/descriptor.h"
#include "io/folders/own_folder.h"
#include "storage/shard_storage.h"
#include "storage/tier.h"
#include "storage/waited.h"

namespace ds::storage {
namespace {

constexpr int kBlocks = 8;

std::string host_name() {
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  return host;
}

std::string name_of_type(c10::Device device) { return c10::DeviceTypeName(device.type(), true); }

std::string name_of_rate(c10::Device device, const Placement& rest) {
  std::string name = host_name() + "-" + name_of(rest.rest) + "-" + name_of_type(device);
  struct stat drive;
  if (rest.rest == Medium::kFile && ::stat(rest.folder.c_str(), &drive) == 0)
    name += "-" + std::to_string(drive.st_dev);
  return name + (rest.pinned ? "-pinned" : "") + ".rate";
}

using Pair = std::pair<double, double>;

// The file, made where it is missing; closed where `folder` is none, or the folder or the file is not this user's.
io::Descriptor kept_file(const std::string& folder, const std::string& name) {
  if (folder.empty()) return io::Descriptor();
  try {
    for (size_t end = folder.find('/', 1); end != std::string::npos; end = folder.find('/', end + 1))
      ::mkdir(folder.substr(0, end).c_str(), 0700);
    const io::Descriptor there = io::own_folder(folder, /*make=*/true);
    const io::Descriptor made(
        ::openat(there.get(), name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    return io::open_file_of(made.is_open() ? io::owner_of(made) : io::owner_of(there), there, name);
  } catch (const Error&) {
    return io::Descriptor();
  }
}

// The rates in the file, else those that measure() finds and writes there while others wait.
Pair kept(const std::string& folder, const std::string& name, const char* what, const std::function<Pair()>& measure) {
  const io::Descriptor file = kept_file(folder, name);
  if (!file.is_open()) return measure();
  while (::flock(file.get(), LOCK_EX) != 0 && errno == EINTR) {
  }
  char text[128] = "";
  Pair found;
  if (::pread(file.get(), text, sizeof text - 1, 0) > 0 &&
      ::sscanf(text, "%lf %lf", &found.first, &found.second) == 2 && found.first > 0 && found.second > 0)
    return found;
  found = measure();
  const int length = ::snprintf(text, sizeof text, "%.0f %.0f %s\n", found.first, found.second, what);
  if (::ftruncate(file.get(), 0) == 0 && ::pwrite(file.get(), text, static_cast<size_t>(length), 0) != length)
    (void)!::ftruncate(file.get(), 0);  // half a number is none
  return found;
}

// The rate at which threads read and write host memory: bytes per second, the best of three.
double copy_rate(int threads) {
  constexpr size_t kBytes = size_t{64} << 20;
  std::vector<char> from(kBytes, 1), to(kBytes, 2);
  const size_t part = kBytes / static_cast<size_t>(threads);
  double best = 0;
  for (int round = 0; round < 3; ++round) {
    double seconds = 0;
    {
      const Waited timed(seconds);
      std::vector<std::thread> all;
      for (size_t t = 0; t < static_cast<size_t>(threads); ++t)
        all.emplace_back([&, t] { std::memcpy(to.data() + t * part, from.data() + t * part, part); });
      for (std::thread& one : all) one.join();
    }
    best = std::max(best, static_cast<double>(part) * threads / std::max(seconds, 1e-9));
  }
  return best;
}

double device_copy_rate(c10::Device device) {
  constexpr int64_t kBytes = int64_t{64} << 20;
  constexpr int kCopies = 8;
  const auto options = at::TensorOptions().device(device).dtype(at::kByte);
  const at::Tensor from = at::zeros({kBytes}, options), to = at::zeros({kBytes}, options);
  double best = 0;
  for (int round = 0; round < 3; ++round) {
    double seconds = 0;
    {
      const Waited timed(seconds);
      for (int copy = 0; copy < kCopies; ++copy) to.copy_(from);
      to[0].item<uint8_t>();  // when all are done
    }
    best = std::max(best, static_cast<double>(kBytes) * kCopies / std::max(seconds, 1e-9));
  }
  return best;
}

}  // namespace

namespace {

// A plane that rests there, whose blocks have been written.
struct MeasuredPlane {
  ShardStorage storage;
  const Medium at;  // of who works with it
  std::vector<plan::Range> blocks;
  PlaneId plane{};

  MeasuredPlane(c10::Device device, const Placement& rest, const FileAccess& files, int64_t bytes)
      : storage(device, {}, files), at(rest.rest == Medium::kFile ? Medium::kHost : Medium::kDevice) {
    const int64_t block = std::max<int64_t>(1, bytes / kBlocks);
    Cuts cuts;
    for (int64_t begin = 0; begin < bytes; begin += block) {
      blocks.push_back({begin, std::min(bytes, begin + block)});
      cuts.push_back(blocks.back().end);
    }
    plane = storage.add("rate", bytes, at::kByte, rest, cuts);
    each_block(Access::kWrite);
  }

  void each_block(Access access, bool ahead = false) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (ahead && i + 1 < blocks.size()) storage.prefetch(plane, blocks[i + 1], at);
      const Lease lease = storage.acquire(plane, blocks[i], access, at);
      if (access == Access::kWrite) lease.data().fill_(1);
    }
    storage.settle();
  }
};

}  // namespace

TierRate measure_rate(c10::Device device, const Placement& rest, const FileAccess& files, int64_t bytes) {
  MeasuredPlane measured(device, rest, files, bytes);
  const auto usage = [&] { return measured.storage.usage()[static_cast<size_t>(rest.rest)]; };
  const MediumUsage before = usage();
  measured.each_block(Access::kWrite);
  measured.each_block(Access::kRead);
  const MediumUsage after = usage();
  const auto rate = [](int64_t moved, double seconds) {
    return seconds > 0 ? static_cast<double>(moved) / seconds : 0.0;
  };
  return {rate(after.read_bytes - before.read_bytes, after.read_seconds - before.read_seconds),
          rate(after.written_bytes - before.written_bytes, after.write_seconds - before.write_seconds)};
}

TierRate known_rate(const std::string& folder, c10::Device device, const Placement& rest, const FileAccess& files) {
  const auto [read, write] = kept(folder, name_of_rate(device, rest), "bytes per second read and written", [&] {
    const TierRate rate = measure_rate(device, rest, files);
    return Pair{rate.read, rate.write};
  });
  return {read, write};
}

double known_update_rate(const std::string& folder, c10::Device device, const Placement& rest,
                         const FileAccess& files) {
  constexpr int64_t kBytes = int64_t{64} << 20;
  return kept(folder, "updates-" + name_of_rate(device, rest), "bytes per second read and written, together, twice",
              [&] {
                MeasuredPlane measured(device, rest, files, kBytes);
                double seconds = 0;
                {
                  const Waited timed(seconds);
                  measured.each_block(Access::kUpdate, /*ahead=*/true);
                }
                const double rate = 2.0 * kBytes / std::max(seconds, 1e-9);
                return Pair{rate, rate};
              })
      .first;
}

int known_threads(const std::string& folder, int most) {
  if (most <= 1) return 1;
  const std::string name = host_name() + "-threads-of-" + std::to_string(most) + ".rate";
  const auto [threads, rate] = kept(folder, name, "bytes per second that threads copy", [&] {
    std::map<int, double> rates;
    for (int count = 1; count < 2 * most; count *= 2) rates[std::min(count, most)] = copy_rate(std::min(count, most));
    double best = 0;
    for (const auto& [count, found] : rates) best = std::max(best, found);
    const auto first = find_if(rates, [&](const auto& one) { return one.second >= 0.9 * best; });
    return Pair{static_cast<double>(first->first), first->second};
  });
  return std::clamp(static_cast<int>(threads), 1, most);
}

double known_copy_rate(const std::string& folder, c10::Device device, int threads) {
  const std::string whose = device.is_cpu() ? std::to_string(threads) + "-threads" : name_of_type(device);
  return kept(folder, host_name() + "-copies-of-" + whose + ".rate", "bytes per second copied, twice",
              [&] {
                const double rate = device.is_cpu() ? copy_rate(std::max(1, threads)) : device_copy_rate(device);
                return Pair{rate, rate};
              })
      .first;
}

namespace {

// Whether other users may have written there: then what is kept there is not used.
bool foreign(const std::string& folder) {
  struct stat found {};
  if (::stat(folder.c_str(), &found) != 0) return false;  // this process makes it
  const bool own = found.st_uid == ::geteuid() || found.st_uid == 0;
  return !own || ((found.st_mode & S_IWOTH) != 0 && (found.st_mode & S_ISVTX) == 0);
}

std::string named_folder() {
  if (const char* cache = ::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache == '/')
    return std::string(cache) + "/deepspeed/rates";
  const char* named = ::getenv("HOME");
  std::string home = named == nullptr ? "" : named;
  if (home.empty()) {
    passwd entry, *found = nullptr;
    std::vector<char> texts(16384);
    if (::getpwuid_r(::geteuid(), &entry, texts.data(), texts.size(), &found) == 0 && found != nullptr)
      home = found->pw_dir;
  }
  return home.size() > 1 && home[0] == '/' ? home + "/.cache/deepspeed/rates" : "";
}

}  // namespace

std::string rates_folder() {
  const std::string folder = named_folder();
  return folder.empty() || foreign(folder.substr(0, folder.rfind('/'))) || foreign(folder) ? "" : folder;
}

}  // namespace ds::storage
