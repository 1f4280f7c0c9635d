#include "storage/meta_memory.h"

#include <algorithm>
#include <mutex>
#include <utility>

namespace ds::storage {

struct MetaMemory::Count {
  std::mutex mutex;  // graphs are released by whoever lets go of them
  int64_t live = 0, peak = 0;

  void add(int64_t bytes) {
    std::lock_guard lock(mutex);
    live += bytes;
    peak = std::max(peak, live);
  }
};

// A storage's placeholder for memory.
struct MetaMemory::Counted {
  std::shared_ptr<Count> count;
  int64_t bytes;

  static void release(void* one) {
    const auto* counted = static_cast<Counted*>(one);
    counted->count->add(-counted->bytes);
    delete counted;
  }
};

MetaMemory::MetaMemory() : count_(std::make_shared<Count>()) {}

void MetaMemory::tie(const at::Tensor& tensor, bool counts) {
  if (!tensor.is_meta() || !tensor.has_storage()) return;
  const at::Storage& storage = tensor.storage();
  if (storage.data_ptr().get_context()) return;
  const int64_t bytes = counts ? static_cast<int64_t>(storage.nbytes()) : 0;
  count_->add(bytes);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(
      {nullptr, new Counted{count_, bytes}, &Counted::release, tensor.device()});
}

void MetaMemory::track(const at::Tensor& tensor) { tie(tensor, true); }
void MetaMemory::ignore(const at::Tensor& tensor) { tie(tensor, false); }

int64_t MetaMemory::live() const {
  std::lock_guard lock(count_->mutex);
  return count_->live;
}

int64_t MetaMemory::peak() const {
  std::lock_guard lock(count_->mutex);
  return count_->peak;
}

void MetaMemory::reset_peak() {
  std::lock_guard lock(count_->mutex);
  count_->peak = count_->live;
}

}  // namespace ds::storage
