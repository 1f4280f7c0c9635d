// Tensors that wait for backward in another memory: chunks of a sequence, inputs of layers that are computed again.
//
// Tensors of as many bytes share planes, a block each, and the next one gets the block of one that was dropped: a run
// opens few files, and none twice. put() copies the tensor beside the device's work and returns; the copy back can be
// started before it is needed.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "storage/shard_storage.h"

namespace ds::storage {

class TensorStore {
 public:
  static constexpr int kAtOnce = 2;

  // `at_once`: how many times the bytes of the largest tensor its copies may have of the device, whether they are on
  // their way or wait for the next tensor.
  TensorStore(c10::Device device, Placement placement, FileAccess files = {}, int at_once = kAtOnce);

  // The most bytes that copies take of the device where the largest tensor has `largest`.
  static int64_t room(int64_t largest, int at_once = kAtOnce) { return largest * at_once; }

  // A number for get() and drop(). The tensor may be changed or freed when the call returns.
  int64_t put(const at::Tensor& tensor);
  // A copy on the device. Throws what writing or reading it has thrown, and ErrorKind::kValue for an unknown number.
  at::Tensor get(int64_t number);
  void prefetch(int64_t number);  // a hint that get() of it comes next
  void drop(int64_t number);      // frees it; unknown numbers are ignored

  int64_t waiting() const;  // tensors
  Usage usage() const { return storage_->usage(); }
  c10::Device device() const { return storage_->device(); }

 private:
  struct Block {
    PlaneId plane;
    plan::Range range;
  };
  struct Waiting {
    Block block;
    std::vector<int64_t> sizes;
    at::ScalarType type;
    int64_t bytes;
  };
  struct Blocks {
    int64_t count = 0;
    std::vector<Block> free;
  };
  Block block_for(int64_t bytes);
  Waiting find(int64_t number);
  void make_room(int64_t bytes);
  void end_copies(int64_t most);  // the oldest of `leaving_`, until they have at most `most` bytes

  const Placement placement_;
  const int at_once_;
  const std::shared_ptr<ShardStorage> storage_;
  mutable std::mutex lock_;
  std::map<int64_t, Waiting> waiting_;
  std::map<int64_t, Blocks> blocks_;  // by bytes
  // On the meta device, where a copy takes no time: the latest ones, as many as have room, as if they were on their
  // way. Where writing takes long, they are.
  std::deque<std::pair<Block, Lease>> leaving_;
  int64_t next_ = 0, largest_ = 0;
};

}  // namespace ds::storage
