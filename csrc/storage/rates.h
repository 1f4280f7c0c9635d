// Rates of transfers from and to a tier on this machine: measured once, and kept in a file.
#pragma once
#include <c10/core/Device.h>

#include <cstdint>
#include <string>

#include "storage/file_access.h"
#include "storage/placement.h"

namespace ds::storage {

struct TierRate {
  double read = 0, write = 0;  // bytes per second
};

// Writes and reads `bytes` in blocks, to and from who works with them: the device, or the host where it is files.
TierRate measure_rate(c10::Device device, const Placement& rest, const FileAccess& files = {},
                      int64_t bytes = int64_t{64} << 20);

// Reads the rates of this machine, this kind of device and, for files, this drive from a file in `folder`. Without an
// entry it measures them and writes them there, one process at a time: ranks that start together do not measure each
// other. If the file cannot be written, or is not this user's own, it measures each time.
TierRate known_rate(const std::string& folder, c10::Device device, const Placement& rest, const FileAccess& files = {});

// The bytes per second that travel in both directions together while blocks are changed one after the other, as an
// update of states does it: the next one is fetched and the last one written back meanwhile. Kept in a file as above.
double known_update_rate(const std::string& folder, c10::Device device, const Placement& rest,
                         const FileAccess& files = {});

// The fewest threads, of at most `most`, that bring host memory to nine tenths of its rate. Kept in a file as above.
int known_threads(const std::string& folder, int most);

// The bytes per second that `threads` threads, or a device, copy within its memory. Kept in a file as above.
double known_copy_rate(const std::string& folder, c10::Device device, int threads);

// The folder of the files: ~/.cache/deepspeed/rates, or below XDG_CACHE_HOME. Without HOME the home folder of this user
// in the list of users counts; without that it is an empty text, and everything is measured each time.
std::string rates_folder();

}  // namespace ds::storage
