#include "comm/communicator.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <thread>
#include <utility>

#include "base/error.h"

namespace ds::comm {

namespace {

// The host waits until the device has done what was asked of it so far: a work's wait() only orders streams there.
void finish_device(c10::Device device) {
  if (device.type() == c10::DeviceType::CPU) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  c10::Event event(device.type());
  event.record(guard.getStream(device));
  while (!event.query()) std::this_thread::yield();
}

class EndedWork : public Work {
 public:
  void wait() override {}
  bool ready() override { return true; }
};

}  // namespace

template <typename Start>
WorkPtr Communicator::run(const char* op, const at::Tensor& largest, const Start& start) {
  if (!logging_) return start();
  finish_device(largest.device());  // so that earlier work of the device is not counted
  const auto begin = std::chrono::steady_clock::now();
  start()->wait();
  finish_device(largest.device());
  const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - begin;
  log_.push_back({op, largest.numel() * static_cast<int64_t>(largest.element_size()), ms.count()});
  return std::make_shared<EndedWork>();
}

std::shared_ptr<Communicator> Communicator::among(const std::vector<int>&) { return nullptr; }

std::vector<LoggedCall> Communicator::take_log() { return std::exchange(log_, {}); }

void Communicator::count(int64_t elements, const at::Tensor& tensor) {
  ++traffic_.calls;
  traffic_.elements += elements;
  traffic_.bytes += elements * static_cast<int64_t>(tensor.element_size());
}

WorkPtr Communicator::all_reduce(const at::Tensor& tensor, ReduceOp op, const std::string& tag) {
  count(2 * tensor.numel() * (size() - 1) / size(), tensor);
  return run("all_reduce", tensor, [&] { return start_all_reduce(tensor, op, tag); });
}

WorkPtr Communicator::broadcast(const at::Tensor& tensor, int root, const std::string& tag) {
  count(size() > 1 ? tensor.numel() : 0, tensor);
  return run("broadcast", tensor, [&] { return start_broadcast(tensor, root, tag); });
}

WorkPtr Communicator::reduce_scatter(const at::Tensor& input, const at::Tensor& output, const std::string& tag) {
  if (input.numel() != output.numel() * size())
    fail(ErrorKind::kValue, "reduce_scatter: ", input.numel(), " elements for ", size(), " rows of ", output.numel());
  count(input.numel() * (size() - 1) / size(), input);
  return run("reduce_scatter", input, [&] { return start_reduce_scatter(input, output, tag); });
}

WorkPtr Communicator::all_gather(const at::Tensor& mine, const at::Tensor& all, const std::string& tag) {
  if (all.numel() != mine.numel() * size())
    fail(ErrorKind::kValue, "all_gather: ", all.numel(), " elements for ", size(), " rows of ", mine.numel());
  count(all.numel() * (size() - 1) / size(), all);
  return run("all_gather", all, [&] { return start_all_gather(mine, all, tag); });
}

}  // namespace ds::comm
