#include "comm/shm_communicator.h"

#include <cstdlib>
#include <string>

#include "comm/hierarchical_communicator.h"
#include "comm/process_peer_memory.h"
#include "comm/shm_work.h"

namespace ds::comm {

namespace {

class ShmCommunicator : public Communicator {
 public:
  ShmCommunicator(CommunicatorPtr inner, std::unique_ptr<ShmGroup> group)
      : inner_(std::move(inner)),
        queue_(std::make_shared<ShmQueue>(std::move(group))),
        background_(has_spare_cores(inner_->size())) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string name() const override { return "shm"; }
  void barrier() override {
    queue_->complete(queue_->submit([](ShmGroup& group) { group.barrier(); }, ShmQueue::Start::kByWaiting));
  }
  PeerMemoryPtr peer_memory(int64_t bytes) override {
    return process_peer_memory(*this, bytes, [queue = queue_](int rank, std::chrono::steady_clock::time_point since) {
      queue->group().channel().look_after(rank, since, "the values of its parameters");
    });
  }
  void leave() override { inner_->leave(); }

 protected:
  WorkPtr start_all_reduce(const at::Tensor& tensor, ReduceOp op, Tag tag) override {
    if (!tensor.device().is_cpu()) return inner_->all_reduce(tensor, op, tag);
    return start([tensor, op, tag = std::string(tag)](ShmGroup& group) {
      group.all_reduce(tensor.data_ptr(), numel(tensor), tensor.scalar_type(), row_op(op), tag);
    });
  }

  WorkPtr start_broadcast(const at::Tensor& tensor, int root, Tag tag) override {
    if (!tensor.device().is_cpu()) return inner_->broadcast(tensor, root, tag);
    return start([tensor, root, tag = std::string(tag)](ShmGroup& group) {
      group.broadcast(tensor.data_ptr(), numel(tensor), tensor.scalar_type(), root, tag);
    });
  }

  WorkPtr start_reduce_scatter(const at::Tensor& input, const at::Tensor& output, Tag tag) override {
    if (!input.device().is_cpu()) return inner_->reduce_scatter(input, output, tag);
    const bool wide = input.scalar_type() != output.scalar_type();
    return start([input, output, wide, tag = std::string(tag)](ShmGroup& group) {
      group.reduce_scatter(output.data_ptr(), rows(input, group.size()), numel(output), input.scalar_type(),
                           RowOp::kSum, wide, tag);
    });
  }

  WorkPtr start_all_gather(const at::Tensor& mine, const at::Tensor& all, Tag tag) override {
    if (!all.device().is_cpu()) return inner_->all_gather(mine, all, tag);
    return start([mine, all, tag = std::string(tag)](ShmGroup& group) {
      group.all_gather(rows(all, group.size()), mine.data_ptr(), numel(mine), mine.scalar_type(), tag);
    });
  }

 private:
  static size_t numel(const at::Tensor& tensor) { return static_cast<size_t>(tensor.numel()); }
  static Rows rows(const at::Tensor& all, int count) {
    return rows_of(all.data_ptr(), count, all.nbytes() / static_cast<size_t>(count));
  }
  WorkPtr start(std::function<void(ShmGroup&)> run) {
    return std::make_shared<ShmWork>(
        queue_, queue_->submit(std::move(run), background_ ? ShmQueue::Start::kSoon : ShmQueue::Start::kByWaiting));
  }

  CommunicatorPtr inner_;
  std::shared_ptr<ShmQueue> queue_;
  const bool background_;
};

}  // namespace

CommunicatorPtr shm_communicator(CommunicatorPtr inner, std::chrono::milliseconds timeout, const GroupFacts& facts) {
  const char* wish = std::getenv("DS_SHM_COLLECTIVES");
  if (inner->size() == 1 || (wish && std::string(wish) == "0")) return inner;
  if (auto made = hierarchical_communicator(inner, timeout, facts, host_id())) return made;
  auto group = ShmGroup::create(inner->rank(), inner->size(), rendezvous_over(*inner), timeout, facts);
  if (!group) return inner;
  return std::make_shared<ShmCommunicator>(std::move(inner), std::move(group));
}

}  // namespace ds::comm
