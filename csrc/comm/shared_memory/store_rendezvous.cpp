#include "comm/shared_memory/store_rendezvous.h"

#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace ds::comm {

// For a few words of each rank: what the segments say of each other would be too much
// where many ranks are on many hosts.
bool on_one_host(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  const auto bytes_of = [](int64_t id) {
    std::vector<uint8_t> bytes(sizeof id);
    std::memcpy(bytes.data(), &id, sizeof id);
    return bytes;
  };
  const std::vector<uint8_t> mine = bytes_of(host_id());
  if (rank != 0) {
    store->set("deepspeed/host/" + std::to_string(rank), mine);
  } else {
    bool one = true;
    for (int r = 1; r < size; ++r) one = store->get("deepspeed/host/" + std::to_string(r)) == mine && one;
    store->set("deepspeed/host/one", std::vector<uint8_t>{static_cast<uint8_t>(one)});
  }
  return store->get("deepspeed/host/one") == std::vector<uint8_t>{1};
}

Rendezvous rendezvous_over_store(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  Rendezvous made;
  const auto round = std::make_shared<int>(0);
  made.exchange = [=](const SegmentFacts& mine) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&mine);
    store->set("deepspeed/shm/" + std::to_string(rank), std::vector<uint8_t>(bytes, bytes + sizeof(mine)));
    std::vector<SegmentFacts> all(size);
    for (int r = 0; r < size; ++r) {
      const std::vector<uint8_t> theirs = store->get("deepspeed/shm/" + std::to_string(r));
      if (theirs.size() == sizeof(SegmentFacts)) std::memcpy(&all[r], theirs.data(), sizeof(SegmentFacts));
    }
    return all;
  };
  made.all = [=](bool ok) {
    const std::string key = "deepspeed/shm/ok" + std::to_string((*round)++) + "/";
    store->set(key + std::to_string(rank), std::vector<uint8_t>{static_cast<uint8_t>(ok)});
    for (int r = 0; r < size; ++r) {
      const std::vector<uint8_t> theirs = store->get(key + std::to_string(r));
      ok = ok && theirs.size() == 1 && theirs[0] == 1;
    }
    return ok;
  };
  return made;
}

}  // namespace ds::comm
