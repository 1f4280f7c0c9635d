// Gradients on their way from autograd into the flat buffers and across the ranks.
//
// [Note: one reduction]
// The sum of a bucket reaches its owners by a reduce-scatter over the ranks of its space that hold shards, then an
// all-reduce over those that hold the same shard, each where there is more than one rank (SpaceRanks). At stage 0 the
// first is a group of one, and the whole bucket is the row that this rank owns: it is summed in place.
//
// [Note: local and reduced]
// A backward fills *slots*, which have the layout of the full space: the store's local buffer where there is one
// (stages 0 and 1, and inside no_sync), else memory that a bucket borrows from its first gradient until it is reduced
// (stages 2 and 3). Reducing a bucket puts this rank's row of the sum into the reduced gradients, added to what earlier
// micro-steps left there. In a space that is reduced in place, slots and reduced gradients are the same memory: what
// has been reduced is equal on all ranks, so a second reduction leaves it as it is where it takes the mean over the
// space's ranks; anything else (a sum; experts, which are divided by more ranks than have them) is undone before more
// is added. At stage 1 the row is reduced in place, in the local buffer; only when another backward follows before the
// step does it move to memory of its own.
//
// [Note: one backward]
// begin() detaches every .grad, so autograd always hands over a fresh tensor; the hook moves it into the parameter's
// slot (its part of the flat buffer) and frees it. end() attaches the slots as .grad where the dtypes agree. Between
// the two no .grad aliases a buffer, so a bucket that is being reduced cannot be written by autograd.
//
// [Note: bucket order]
// Ranks may produce gradients in different orders, or not at all; collectives must match. So buckets leave strictly
// in plan order, and at the end of backward the rest leaves, used or not. Where a bucket is on its way says its state
// (BucketState); an illegal transition is an error.
//
// [Note: memory during backward]
// If gradients are sharded, whole ones exist only between their backward and their reduction: buckets leave as early
// as they can, from the first backward on (each parameter is taken to fire once, what comes later is late), and their
// slots are free again as soon as they have been sent. A reduction on a stream of the device runs beside the backward
// until the next but one leaves: then the stream that computes waits for it. So at most two buckets that have left have
// slots, beside those that are being filled. What has arrived waits in `received` until the backward has ended: one
// that raises leaves nothing behind.
//
// [Note: used flags]
// With the last bucket travels one flag for each parameter: did any rank produce a gradient? The optimizer leaves
// alone what none has used, exactly as a plain PyTorch process does with a .grad of None.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "zero/gradients/bucket_reduction.h"
#include "zero/device_context.h"
#include "zero/gradients/grad_use_counter.h"
#include "zero/gradients/flag_exchange.h"
#include "zero/gradients/grad_arrivals.h"
#include "zero/gradients/grad_slots.h"
#include "zero/gradients/grad_views.h"
#include "zero/gradients/nonfinite_grads.h"
#include "zero/spaces/param_store.h"

namespace ds::zero {

class GradReducer {
 public:
  GradReducer(ParamStore& store, DeviceContext& device, ReducerOptions options);

  void begin(bool reduce);  // a backward starts; `reduce`: the ranks add up what it leaves
  // It has ended; after a reducing one every rank holds its part of the sum. Fails on every rank where a kernel has
  // failed on one of them, in whatever thread, and where they do not agree.
  void end();
  bool abort();  // it raised; true when gradients of earlier micro-steps were lost with it
  // It raised on this rank, perhaps on no other. Where the ranks reduce together, this one takes part in the rest of
  // the reduction, so that their calls agree, and end() fails on all others; otherwise the same as abort().
  bool abort_together();
  void on_grad(size_t param);  // the accumulator hook; any thread, no GIL
  void end_use(size_t param);  // see [Note: one use]; the same threads
  void finish();               // before a step: takes .grad as the user left it, reduces what is still local
  void join();                 // the part of a rank without a backward in the reduction of the others'
  void clear();                // forget all gradients; .grad becomes undefined
  // Drops the errors that reductions have kept of earlier ones: other weights have been loaded.
  void forget_errors() {
    for (GradBucket& bucket : buckets_) bucket.way->forget();
  }
  void follow_moves() { views_.follow_moves(); }            // after planes of gradients have moved
  void set_grad_dtype(c10::optional<at::ScalarType> type);  // see ParamStore; not while active
  bool active() const { return phase_ != Phase::kIdle; }
  bool reducing() const { return phase_ == Phase::kReducing; }
  bool dirty() const { return dirty_; }  // something is here that has not been reduced

  // A reduced gradient is here.
  bool used(size_t param) const { return store_.space_of(param).in_place ? filled(param) : used_[param] != 0; }
  // This rank has a gradient that has not been reduced; it lies in its slot of the store's local buffer.
  bool has_local(size_t param) const;
  void set_used(size_t param);  // somebody has written the reduced gradient
  // This is what this rank has accumulated and nobody has reduced. Not while active.
  void set_local(size_t param, const at::Tensor& grad);
  bool any() const;  // a gradient has arrived since clear(), or the user has set one
  // Counts of the last reducing backward.
  struct Counts {
    int64_t late = 0;        // gradients that came after their bucket had left, over all ranks
    int64_t overlapped = 0;  // buckets that left before backward's end
  };
  const Counts& counts() const { return counts_; }
  Agreement& agreement() { return agreement_; }
  GradUseCounter& grad_uses() { return grad_uses_; }
  const GradUseCounter& grad_uses() const { return grad_uses_; }
  // `listener` hears of gradients that arrive before backward's end; null: nobody. Only where this rank's row comes of
  // one collective (no replicas): others wait for the end.
  void tell(GradArrivals* listener) { listener_ = listener; }
  // Asked at the begin of each backward: whether each rank keeps its own gradients (ReducerOptions::local).
  void ask_local(std::function<bool()> ask) { ask_local_ = std::move(ask); }
  bool local() const { return options_.local; }                      // those of the last backward
  ReducerOptions& options() { return options_; }                     // not to be changed while a backward runs
  const WireBuffers& memory() const { return reduction_.memory(); }  // slots, wire and receive buffers
  void trim() { reduction_.memory().clear(); }  // those of them that are kept for the next backward

  // Parameters whose local gradients were inf or nan.
  std::vector<NonfiniteGrad> local_nonfinite_grads() const { return nonfinite_.found(); }

 private:
  enum class Phase { kIdle, kAccumulating, kReducing };
  enum class Arrivals { kUnwanted, kWanted, kTold };  // kTold: until the next backward or the step
  // A collective that a backward had launched before it raised, with the memory that it still reads and writes.
  struct Abandoned {
    comm::WorkPtr work;
    at::Tensor slots, wire, received;
  };

  void adopt_user_grads();
  at::Tensor local_slots(GradBucket& bucket);  // of the store's local buffer; not while a backward runs
  void absorb(size_t param, const at::Tensor& grad);
  void count(size_t param);
  void make_room();
  void undo_sum(const GradBucket& bucket);
  void launch(GradBucket& bucket);
  void launch_ready();
  void reduce_rest();
  void close();
  void exchange_flags();
  bool arrives(const GradBucket& bucket) const;
  void arrive(GradBucket& bucket);
  void changes(GradBucket& bucket);
  void withdraw();
  GradBucket& bucket_of(size_t param) { return buckets_[bucket_of_[param]]; }
  bool filled(size_t param) const { return filled_[param] != SlotState::kEmpty; }

  ParamStore& store_;
  DeviceContext& device_;
  GradSlots slots_;
  GradViews views_;
  const int rank_;
  ReducerOptions options_;
  BucketReduction reduction_;
  std::vector<GradBucket> buckets_;
  const bool stays_;  // nothing travels, of any bucket: gradients are summed where they are filled in
  std::vector<Abandoned> abandoned_;
  std::vector<int32_t> bucket_of_;
  std::unique_ptr<FlagExchange> flags_;

  std::mutex mutex_;  // hooks may come from one thread per device
  Phase phase_ = Phase::kIdle;
  size_t next_bucket_ = 0;
  Arrivals arrivals_ = Arrivals::kUnwanted;
  GradArrivals* listener_ = nullptr;
  std::function<bool()> ask_local_;
  bool dirty_ = false;             // something in the slots has not been reduced
  std::vector<SlotState> filled_;  // of each parameter
  std::vector<uint8_t> used_;      // not in place: some rank has contributed to the reduced gradient
  std::vector<at::Tensor> late_;   // gradients that came after their bucket had left
  GradUseCounter grad_uses_;
  std::array<float, 2> failed_ranks_{};  // in the backward that ends: how many, and the sum of rank + 1
  Agreement agreement_;
  bool agreed_ = true;  // in the backward that ends
  NonfiniteGrads nonfinite_;
  Counts counts_;
};

}  // namespace ds::zero
