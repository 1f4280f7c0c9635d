// The bytes of the states of a model, computed before any is allocated. Integers only.
//
// Two questions with two answers. `states_per_rank` is what the engine holds between steps: exact but for padding. The
// `zero2_need` and `zero3_need` functions are the published rules of thumb by which users choose hardware; they count
// what initialisation and the step need for a moment as well, for mixed precision with Adam, and stay as published so
// that figures can be compared. All sizes are >= 0, ranks and nodes >= 1, else ErrorKind::kValue; a result beyond 63
// bits is ErrorKind::kValue as well.
#pragma once
#include <cstdint>

namespace ds::plan {

// Bytes per element of each state; 0 where there is no such buffer (fp32 training keeps no separate master weights).
struct StateWidths {
  int64_t param;   // of the weights that the model computes with
  int64_t grad;    // the accumulated gradient
  int64_t master;  // fp32 copy of a 16-bit parameter
  int64_t slots;   // all states of the optimizer together: 8 for Adam
};

struct StateBytes {
  int64_t param, grad, master, slots;
  int64_t total() const { return param + grad + master + slots; }
};

struct Sharded {
  bool params, grads, states;  // states: masters and slots
};

// Held by each of `world` ranks outside of compute: what is sharded costs 1/world, rounded up. 2 + 2 + 12 bytes per
// parameter with 16-bit parameters and gradients, fp32 masters and Adam.
StateBytes states_per_rank(const Sharded& sharded, int64_t numel, int64_t world, const StateWidths& widths);

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
