// The published rules of thumb for the memory of a model's states, by which users choose hardware. They count what
// initialisation and the step need for a moment as well, for mixed precision with Adam, and stay as published so that
// figures can be compared; what a job will take, the planner says (python/deepspeed/planner). Integers only. All sizes
// are >= 0, ranks and nodes >= 1, else ErrorKind::kValue; a result beyond 63 bits is ErrorKind::kValue as well.
#pragma once
#include <cstdint>

namespace ds::plan {

// Elements of a bucket at most where states rest elsewhere: several buckets, so that one travels while another one is
// stepped.
int64_t moved_bucket_limit(int64_t numel);

struct Node {
  int64_t ranks;  // per node
  int64_t nodes;
};

struct MemoryNeed {
  int64_t host_bytes;    // per node, without room for other buffers
  int64_t device_bytes;  // per rank
};

// Optimizer states (12 bytes per parameter) and fp32 gradients (4) on the devices, sharded, or on the host.
MemoryNeed zero2_need(int64_t numel, const Node& node, bool offload_optimizer);

struct Zero3Options {
  bool offload_optimizer;
  bool offload_params;  // needs offload_optimizer, else ErrorKind::kValue
  bool sharded_init;    // built inside zero.Init; otherwise each rank first holds the whole fp32 model on the host
};

// `largest_layer_numel`: parameters of the largest module, which is gathered whole (2 bytes, and 2 for its gradient).
MemoryNeed zero3_need(int64_t numel, int64_t largest_layer_numel, const Node& node, const Zero3Options& options);

}  // namespace ds::plan
