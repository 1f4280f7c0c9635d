#include "comm/local_communicator.h"

#include <ATen/Functions.h>

namespace ds::comm {

namespace {

class DoneWork : public Work {
 public:
  void wait() override {}
};

class OwnMemory : public PeerMemory {
 public:
  explicit OwnMemory(int64_t bytes) : bytes_(at::zeros({bytes}, at::TensorOptions().dtype(at::kByte))) {}
  at::Tensor region(int) override { return bytes_; }
  void publish() override {}
  void await(int64_t) override {}

 private:
  at::Tensor bytes_;
};

class LocalCommunicator : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string name() const override { return "local"; }
  void barrier() override {}
  PeerMemoryPtr peer_memory(int64_t bytes) override { return std::make_shared<OwnMemory>(bytes); }

 protected:
  WorkPtr start_all_reduce(const at::Tensor&, ReduceOp, Tag) override { return std::make_shared<DoneWork>(); }
  WorkPtr start_broadcast(const at::Tensor&, int, Tag) override { return std::make_shared<DoneWork>(); }
  WorkPtr start_reduce_scatter(const at::Tensor& input, const at::Tensor& output, Tag) override {
    output.copy_(input.reshape(output.sizes()));
    return std::make_shared<DoneWork>();
  }
  WorkPtr start_all_gather(const at::Tensor& mine, const at::Tensor& all, Tag) override {
    if (mine.data_ptr() != all.data_ptr()) all.copy_(mine.reshape(all.sizes()));
    return std::make_shared<DoneWork>();
  }
};

}  // namespace

CommunicatorPtr local_communicator() { return std::make_shared<LocalCommunicator>(); }

}  // namespace ds::comm
