#include "comm/local_communicator.h"

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
  WorkPtr all_reduce(const at::Tensor&, ReduceOp) override { return std::make_shared<DoneWork>(); }
  WorkPtr broadcast(const at::Tensor&, int) override { return std::make_shared<DoneWork>(); }
  void barrier() override {}
};

}  // namespace

CommunicatorPtr local_communicator() { return std::make_shared<LocalCommunicator>(); }

}  // namespace ds::comm
