// Threads as ranks, and a communicator whose messages take their bytes / rate longer.
#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/communicator.h"

namespace ds::comm {

// Carries out the calls of all ranks, each on a thread of its own.
inline void call_all(const std::vector<std::function<void()>>& calls) {
  std::vector<std::thread> others;
  for (size_t rank = 1; rank < calls.size(); ++rank) others.emplace_back(calls[rank]);
  calls[0]();
  for (std::thread& one : others) one.join();
}

// `bytes_per_s` lives as long as this, and may change between calls; 0: messages take no time.
class SlowLink : public Communicator {
 public:
  SlowLink(CommunicatorPtr inner, const double& bytes_per_s) : inner_(std::move(inner)), rate_(bytes_per_s) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string name() const override { return "slow"; }
  bool carries(const Op& op) const override { return inner_->carries(op); }
  PeerMemoryPtr peer_memory(int64_t) override { return nullptr; }

 protected:
  WorkPtr start(const Op& op) override {
    const auto bytes = static_cast<double>(op.sent(rank(), size()) * op.whole().element_size());
    inner_->run(op)->wait();
    if (rate_ > 0) std::this_thread::sleep_for(std::chrono::duration<double>(bytes / rate_));
    return std::make_shared<DoneWork>();
  }

 private:
  const CommunicatorPtr inner_;
  const double& rate_;
};

}  // namespace ds::comm
