#include "comm/local_communicator.h"

#include <ATen/Functions.h>

namespace ds::comm {

namespace {

class DoneWork : public Work {
 public:
  void wait() override {}
};

class LocalCommunicator : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string name() const override { return "local"; }
  void barrier() override {}

 protected:
  WorkPtr start_all_reduce(const at::Tensor&, ReduceOp) override { return std::make_shared<DoneWork>(); }
  WorkPtr start_broadcast(const at::Tensor&, int) override { return std::make_shared<DoneWork>(); }
  WorkPtr start_reduce_scatter(const at::Tensor& input, const at::Tensor& output) override {
    output.copy_(input.reshape(output.sizes()));
    return std::make_shared<DoneWork>();
  }
  WorkPtr start_all_gather(const at::Tensor& mine, const at::Tensor& all) override {
    if (mine.data_ptr() != all.data_ptr()) all.copy_(mine.reshape(all.sizes()));
    return std::make_shared<DoneWork>();
  }
};

}  // namespace

CommunicatorPtr local_communicator() { return std::make_shared<LocalCommunicator>(); }

}  // namespace ds::comm
