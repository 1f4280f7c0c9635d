// The interface of torch to a kind of device. torch1.cpp and torch2.cpp have the parts in which torch 1 and torch 2
// differ; one of them is built.
#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

#include "counts.h"
#include "memory.h"
#include "standin.h"

namespace standin {

const at::Generator& default_generator(c10::DeviceIndex device);

// Calls of one kind by which the code under test puts work in order. One of them may be left out, or all be listed.
class Waits {
 public:
  void leave_out(int number) {  // kList: none, and the place of each call is kept
    const std::lock_guard lock(mutex_);
    count_ = 0;
    left_out_ = number;
    places_.clear();
  }
  int count() const { return count_; }
  bool is_left_out() {  // of the next call
    const int number = ++count_;
    const bool now = number == left_out_;
    if (now || left_out_ == kList) {
      const Stack here = Stack::here();
      const std::lock_guard lock(mutex_);
      places_[number] = here;
    }
    return now;
  }
  std::string place(int number) const {  // of a call that was left out or listed
    const std::lock_guard lock(mutex_);
    const auto found = places_.find(number);
    return found == places_.end() ? "" : found->second.text();
  }
  // For a call that is repeated until it says so: one that says no does not count.
  template <typename Query>
  bool passed(const Query& query) {
    if (count_ + 1 != left_out_ && !query()) return false;
    is_left_out();
    return true;
  }

 private:
  static constexpr int kList = -1;
  std::atomic<int> count_{0}, left_out_{0};
  mutable std::mutex mutex_;
  std::map<int, Stack> places_;
};

Waits& waits(StandinWait kind);

// The operations that csrc uses on CUDA, too, all of them through c10::impl::VirtualGuardImpl.
class Guard : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kStandin; }
  c10::Device exchangeDevice(c10::Device device) const override { return at(exchange_device(device.index())); }
  c10::Device getDevice() const override { return at(current_device()); }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) exchange_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const noexcept override { return current_stream(device.index()).c10(); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    const c10::DeviceIndex index = device.has_index() ? device.index() : current_device();
    return streams_of(index).front()->c10();
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_from_pool(device.index()).c10();
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return exchange_stream(stream_of(stream)).c10();
  }
  bool queryStream(const c10::Stream& stream) const override {
    const bool now = waits(kStandinHostWait).passed([&] { return passed(mark(stream_of(stream))); });
    if (now) count(Count::kPolls);
    return now;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count_host_wait(/*copies=*/false);
    if (!waits(kStandinHostWait).is_left_out()) wait_on_host(mark(stream_of(stream)));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag) const override {
    TORCH_CHECK(device < 0 || device == stream.device_index(), "an event of standin:", static_cast<int>(device),
                " cannot be recorded on a stream of ", stream.device());
    if (!*event) *event = new Mark;
    *static_cast<Mark*>(*event) = standin::record(stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    count(Count::kStreamWaits);
    if (event && !waits(kStandinStreamWait).is_left_out()) wait(stream_of(stream), *static_cast<Mark*>(event));
  }
  bool queryEvent(void* event) const override {
    const bool now = reached(event);
    if (now) count(Count::kPolls);
    return now;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    count(Count::kKeptMemory);
    if (!waits(kStandinKeptMemory).is_left_out()) also_used_by(memory.get(), stream_of(stream));
  }

 protected:
  static bool reached(void* event) {
    return !event || waits(kStandinHostWait).passed([&] { return passed(*static_cast<Mark*>(event)); });
  }

 private:
  static c10::Device at(c10::DeviceIndex index) { return {kStandin, index}; }
};

}  // namespace standin
