// A communicator whose messages take their bytes / rate longer.
#pragma once
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "comm/communicator.h"

namespace ds::comm {

class SlowLink : public Communicator {
 public:
  SlowLink(CommunicatorPtr inner, double bytes_per_s) : inner_(std::move(inner)), rate_(bytes_per_s) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string name() const override { return "slow"; }
  bool carries(const Op& op) const override { return inner_->carries(op); }
  PeerMemoryPtr peer_memory(int64_t) override { return nullptr; }

 protected:
  WorkPtr start(const Op& op) override {
    const auto bytes = static_cast<double>(op.sent(rank(), size()) * op.whole().element_size());
    inner_->run(op)->wait();
    std::this_thread::sleep_for(std::chrono::duration<double>(bytes / rate_));
    return std::make_shared<DoneWork>();
  }

 private:
  const CommunicatorPtr inner_;
  const double rate_;
};

}  // namespace ds::comm
