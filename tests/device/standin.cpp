#include "standin.h"

#include <c10/util/Exception.h>

#include "device.h"
#include "kernels.h"

namespace standin {

namespace {

// Loading the library makes the devices.
const bool made = [] {
  c10::SetAllocator(kStandin, &device_allocator());
  install_fault_handler();
  return true;
}();

Stream& given(void* stream) { return stream ? *static_cast<Stream*>(stream) : current_stream(current_device()); }

}  // namespace

Waits& waits(StandinWait kind) {
  static auto* all = new std::array<Waits, 3>;
  return all->at(kind);
}

}  // namespace standin

#define DS_VISIBLE __attribute__((visibility("default")))

extern "C" {

DS_VISIBLE const char* standin_launch(void* stream, const char* name, void (*kernel)(void*), void* context) {
  static thread_local std::string error;
  try {
    standin::submit_kernel(standin::given(stream), name, [=] { kernel(context); });
    return nullptr;
  } catch (const c10::Error& e) {
    error = e.what_without_backtrace();
    return error.c_str();
  }
}

DS_VISIBLE void standin_fail(const char* what) { TORCH_CHECK(false, what); }

DS_VISIBLE void standin_choose(uint64_t seed, int mode) { standin::choose(seed, static_cast<StandinMode>(mode)); }

DS_VISIBLE void standin_leave_out(StandinWait kind, int number) { standin::waits(kind).leave_out(number); }

DS_VISIBLE int standin_waits(StandinWait kind) { return standin::waits(kind).count(); }

DS_VISIBLE const char* standin_place(StandinWait kind, int number) {
  static thread_local std::string text;
  text = standin::waits(kind).place(number);
  return text.c_str();
}

DS_VISIBLE void standin_limit(int device, size_t bytes) {
  standin::device_memory(static_cast<c10::DeviceIndex>(device)).limit(bytes);
}

DS_VISIBLE void standin_figures(int device, uint64_t* five) {
  const standin::Figures now = standin::device_memory(static_cast<c10::DeviceIndex>(device)).figures(false);
  const uint64_t all[] = {now.allocated, now.allocated_peak, now.reserved, now.reserved_peak, now.limit};
  std::copy(std::begin(all), std::end(all), five);
}

DS_VISIBLE void standin_new_peaks(int device) {
  standin::device_memory(static_cast<c10::DeviceIndex>(device)).figures(true);
}

DS_VISIBLE void standin_empty_cache() {
  for (c10::DeviceIndex device = 0; device < standin::kDevices; ++device) standin::device_memory(device).give_back();
}

DS_VISIBLE int standin_faults(int clear) { return static_cast<int>(standin::order().reports(clear != 0).size()); }

DS_VISIBLE const char* standin_fault(int index) {
  static thread_local std::string text;
  const std::vector<std::string> all = standin::order().reports(false);
  if (index < 0 || static_cast<size_t>(index) >= all.size()) return nullptr;
  text = all[static_cast<size_t>(index)];
  return text.c_str();
}

DS_VISIBLE void standin_end() { standin::end_streams(); }

}  // extern "C"
