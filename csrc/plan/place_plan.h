// The placement of gradients, masters and optimizer states of a rank with which a step takes the least time: shares of
// three tiers of memory, within the memory of each. Numbers only: zero/offload/auto_placements makes placements of
// them.
//
// A step computes in the tier of an element's masters, on the host if that is files, and operands of other tiers are
// copied there and back. Copies between device and host, reads and writes of files, updates on the host and updates on
// the device run at the same time: a step takes as long as the longest of the four.
#pragma once
#include <array>
#include <cstdint>

namespace ds::plan {

enum PlaceTier { kOnDevice, kOnHost, kInFiles };  // storage::Medium has the same order

struct PlaceRates {                       // 0: takes no time
  double to_host = 0, to_device = 0;      // bytes per second between the device and the host
  double file_read = 0, file_write = 0;   // bytes per second
  double host_step = 0, device_step = 0;  // bytes per second that an update reads and writes
};

struct PlaceNeed {
  int64_t numel = 0;                                // elements of this rank
  double grad = 0, master = 0, slots = 0;           // bytes of an element
  double weight = 0;                                // of the parameter, which is copied to the device
  int64_t accumulation = 1;                         // micro-steps of a step, each of which adds to the gradients
  std::array<int64_t, 3> room = {0, INT64_MAX, 0};  // bytes, by tier
};

// Shares of the elements of one kind, by tier: those in files come first, then those on the host, then those on the
// device.
struct PlaceShares {
  double file = 0, host = 0;
  double device() const { return 1.0 - file - host; }
};

struct PlacePlan {
  PlaceShares grad, master, slots;
  double seconds = 0;  // of a step, at least
  bool fits = false;   // false: the other fields have no meaning
};

// Returns the seconds of the device's link, of files and of updates for elements whose gradients, masters and slots
// rest in one tier each.
std::array<double, 3> place_seconds(const PlaceNeed& need, const PlaceRates& rates, PlaceTier grad, PlaceTier master,
                                    PlaceTier slots);
// The time of a step with such shares, whether they fit or not.
double step_seconds(const PlaceNeed& need, const PlaceRates& rates, const PlaceShares& grad, const PlaceShares& master,
                    const PlaceShares& slots);

// Deterministic. Of plans that take equally long, the one that moves fewer bytes.
PlacePlan place_plan(const PlaceNeed& need, const PlaceRates& rates);

}  // namespace ds::plan
