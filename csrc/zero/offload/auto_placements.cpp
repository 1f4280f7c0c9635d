#include "zero/offload/auto_placements.h"

#include <ATen/Functions.h>

#include <algorithm>

#include "base/error.h"
#include "storage/meta_memory.h"
#include "storage/rates.h"

namespace ds::zero {

namespace {

[[noreturn]] void fail_missing(const StateBytes& need, const TierBytes& have) {
  TierBytes left = have;
  const auto take = [&](int64_t bytes, const char* what) {
    const int64_t here = std::min(bytes, left.device), elsewhere = bytes - here;
    const int64_t host = std::min(elsewhere, left.host);
    if (elsewhere - host > left.file) {
      fail(ErrorKind::kValue, "zero_optimization.placement: ", what, " of this rank need ", elsewhere,
           " bytes beside the device, and ", left.host, " are left of host_gb, ", left.file,
           " of nvme_gb. All of its states are ", need.grad + need.master + need.slots,
           " bytes: raise one of them, or train on more ranks");
    }
    left.device -= here;
    left.host -= host;
    left.file -= elsewhere - host;
  };
  take(need.grad, "gradients");
  take(need.master, "masters");
  take(need.slots, "optimizer states");
  fail(ErrorKind::kValue, "zero_optimization.placement: states of this rank do not fit");
}

storage::Placement placement_of(const plan::PlaceShares& shares, const TierBytes& have) {
  storage::Placement made;
  if (shares.file + shares.host == 0) return made;
  if (shares.file > 0) made.folder = have.folder;
  if (shares.host > 0) {
    made.rest = storage::Medium::kHost;
    made.pinned = have.pinned;
    made.host_share = shares.host;
    made.file_share = shares.file;
  } else {
    made.rest = storage::Medium::kFile;
    made.host_share = shares.file;
  }
  return made;
}

plan::PlaceNeed place_need(const StateBytes& need, const TierBytes& have) {
  plan::PlaceNeed made;
  made.numel = 1;  // of all that this rank owns
  made.grad = static_cast<double>(need.grad);
  made.master = static_cast<double>(need.master);
  made.slots = static_cast<double>(need.slots);
  made.weight = static_cast<double>(need.weight);
  made.accumulation = have.accumulation;
  made.room = {have.device, have.host, have.file};
  return made;
}

}  // namespace

Placements auto_placements(const StateBytes& need, const TierBytes& have) {
  const plan::PlacePlan plan = plan::place_plan(place_need(need, have), have.rates);
  if (!plan.fits) fail_missing(need, have);
  Placements placements;
  placements.grad = placement_of(plan.grad, have);
  placements.master = placement_of(plan.master, have);
  placements.slot = placement_of(plan.slots, have);
  return placements;
}

plan::PlaceRates machine_rates(c10::Device device, bool pinned, const std::string& folder,
                               const storage::FileAccess& files, int threads) {
  plan::PlaceRates rates;
  if (device.is_meta()) {  // nothing can be measured there
    const storage::MetaMemory* planned = storage::MetaMemory::installed();
    return planned ? planned->rates : rates;
  }
  const std::string kept = storage::rates_folder();
  storage::Placement placement;
  placement.rest = storage::Medium::kHost;
  placement.pinned = pinned && !device.is_cpu();
  const storage::TierRate link = storage::known_rate(kept, device, placement);
  rates.to_host = link.write;
  rates.to_device = link.read;
  if (!folder.empty()) {
    placement.rest = storage::Medium::kFile;
    placement.pinned = false;
    placement.folder = folder;
    const storage::TierRate drive = storage::known_rate(kept, device, placement, files);
    rates.file_read = drive.read;
    rates.file_write = drive.write;
  }
  // A copy reads and writes each byte.
  rates.host_step = 2 * storage::known_copy_rate(kept, at::kCPU, threads);
  rates.device_step = 2 * storage::known_copy_rate(kept, device, threads);
  return rates;
}

TierBytes rated(const StateBytes& need, TierBytes have, c10::Device device, const storage::FileAccess& files,
                comm::Communicator& ranks, int threads) {
  const int64_t all = need.grad + need.master + need.slots;
  const bool one_memory = all <= have.device || (have.device == 0 && all <= have.host);
  if (one_memory || have.rates.host_step > 0) return have;
  plan::PlaceRates& r = have.rates;
  r = machine_rates(device, have.pinned, have.folder, files, threads);
  if (device.is_meta()) return have;  // the other ranks do not exist
  const std::array<double*, 6> each = {&r.to_host,    &r.to_device, &r.file_read,
                                       &r.file_write, &r.host_step, &r.device_step};
  const at::Tensor told = at::empty({6}, at::kDouble);
  for (size_t i = 0; i < each.size(); ++i) told.data_ptr<double>()[i] = *each[i];
  const at::Tensor least = told.to(device);
  if (ranks.size() > 1) ranks.all_reduce(least, comm::ReduceOp::kMin, "rates of memories")->wait();
  told.copy_(least);
  for (size_t i = 0; i < each.size(); ++i) *each[i] = told.data_ptr<double>()[i];
  return have;
}

}  // namespace ds::zero
