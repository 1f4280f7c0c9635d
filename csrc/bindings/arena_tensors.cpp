// Tensors in one arena of huge pages: what a whole file is read into. See formats/torch_archive.py.
#include <ATen/Functions.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>
#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "bindings/torch_types.h"
#include "io/memory_arena.h"

namespace py = pybind11;

namespace {

using ds::io::MemoryArena;

constexpr uint64_t kWorthIt = 2 << 20;  // less than a huge page is allocated one by one

struct Block {
  std::shared_ptr<const MemoryArena> arena;
  size_t index;
};

void free_block(void* context) {
  const auto* block = static_cast<Block*>(context);
  block->arena->release(block->index);
  delete block;
}

// A storage like any other: it can grow, by the allocator of the CPU, and is freed alone.
at::Tensor tensor_in(const std::shared_ptr<const MemoryArena>& arena, size_t index, at::ScalarType dtype,
                     int64_t numel) {
  auto* block = new Block{arena, index};
  c10::DataPtr data(arena->block(index), block, &free_block, c10::Device(c10::kCPU));
  const c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<int64_t>(arena->bytes(index)),
                             std::move(data), c10::GetCPUAllocator(), true);
  return at::empty({0}, dtype).set_(storage, 0, {numel}, {1});
}

}  // namespace

DS_BINDINGS(m) {
  // One tensor of one dimension for each (torch.dtype, numel), not filled.
  m.def(
      "arena_tensors",
      [](const std::vector<std::pair<py::object, int64_t>>& wanted) {
        std::vector<uint64_t> sizes;
        std::vector<at::ScalarType> dtypes;
        uint64_t total = 0;
        for (const auto& [dtype, numel] : wanted) {
          dtypes.push_back(ds::bindings::optional_dtype(dtype).value());
          sizes.push_back(static_cast<uint64_t>(numel) * c10::elementSize(dtypes.back()));
          total += sizes.back();
        }
        std::vector<at::Tensor> made;
        const auto arena = total < kWorthIt ? nullptr : MemoryArena::make(sizes);
        for (size_t i = 0; i < wanted.size(); ++i) {
          made.push_back(arena == nullptr ? at::empty({wanted[i].second}, dtypes[i])
                                          : tensor_in(arena, i, dtypes[i], wanted[i].second));
        }
        return made;
      },
      py::arg("wanted"));
}
