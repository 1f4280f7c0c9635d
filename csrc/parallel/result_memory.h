// Memory of large results on the host that come and go every layer: the first touch of new pages costs more than the
// copy into them, and torch's allocator gives large ones back each time.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <vector>

namespace ds::parallel {

class ResultMemory : public std::enable_shared_from_this<ResultMemory> {
 public:
  static constexpr int64_t kLeast = 1 << 20;  // bytes; the allocator is good at smaller ones
  static constexpr size_t kMost = 3;          // as many as one exchange of queries, keys and values gives

  // Uninitialised, its dimensions in memory in the order `order` (outermost first).
  at::Tensor take(const std::vector<int64_t>& sizes, const std::vector<int64_t>& order,
                  const at::TensorOptions& options);

 private:
  void give(at::Tensor bytes);

  std::mutex mutex_;
  std::vector<at::Tensor> free_;
};

}  // namespace ds::parallel
