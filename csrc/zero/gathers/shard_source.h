// The sources of gathered parameters.
//
// [Note: who must take part]
// Ranks may take different branches (experts, depth, the length of what they generate), so a gather must not need the
// others. Peer memory gives that: a rank copies what the owners have published. Where there is none (GPUs, several
// hosts) gathers are collectives in an order that all ranks have learned; where one leaves it, they agree on each
// gather (plan/gather_schedule.h). A rank that is through goes on serving until all are. A rank that shares its
// parameters with no other has them all, and gathers nothing.
//
// [Note: several groups]
// Parameters of a space with ranks of its own (experts) are gathered among the ranks of that space. By peer memory each
// group is for itself. By collectives all groups share one order, on which all data-parallel ranks agree: two orders of
// two groups could wait for each other in a circle. An entry of the order with an expert in it is gathered by every
// group from its own ranks.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/shared_memory/peer_memory.h"
#include "zero/gathers/gather_buffers.h"
#include "zero/spaces/sharded_param.h"
#include "zero/spaces/space_ranks.h"

namespace ds::zero {

// The ranks among which parameters have their slices.
struct GatherGroup {
  comm::CommunicatorPtr ranks;
  std::vector<ShardedParamPtr> params;
  comm::PeerMemoryPtr memory;  // in which their rows lie; null: there is none
  SpaceRanks space{};          // of the parameters; it opens communicators of an order of their own, or over other axes
  Values values = Values::kUsed;  // that these ranks gather of them
  int64_t published = 0;          // how often after_write() of earlier sources has published the memory
  plan::Axes along{};             // of the ranks; {}: those of the space's shards
};

class ShardSource {
 public:
  // `storage`: the memory of gathered values; null while there is no engine.
  explicit ShardSource(std::shared_ptr<storage::ShardStorage> storage) : buffers_(std::move(storage)) {}
  virtual ~ShardSource() = default;
  // All of `params` show `values` afterwards, those that are available in place. `ahead` are wanted soon: a source that
  // has to wait for transfers starts them now.
  virtual void gather(const std::vector<ShardedParam*>& params, const std::vector<ShardedParam*>& ahead,
                      Values values = Values::kUsed) = 0;
  virtual bool looks_ahead() const { return false; }
  // Every slice is a whole parameter and rests on the device. The gathered values are the slices then, and all of them
  // may be here at one time.
  virtual bool has_all() const { return false; }
  // No rank gathers `params` until the next call, as far as each of them knows.
  virtual void leave_out(const std::vector<ShardedParam*>& /*params*/) {}
  virtual void forget_ahead() {}  // gathers that were started ahead are not needed any more
  // A hint: they are wanted soon. Slices that rest elsewhere are fetched.
  virtual void expect(const std::vector<ShardedParam*>& params) { prefetch(params, Values::kUsed); }
  // Available parameters take the values that the shards have now, in place: such values, and exact ones where somebody
  // holds these. Every rank calls it for the same ones.
  virtual void refresh(const std::vector<ShardedParam*>& params, Values values) = 0;
  // Called when forward number `forward` of this rank begins; `wrote`: its user has written to slices since the last
  // one. Where a rank has, all wait for each other, so that all read in that forward the values that were written
  // before it, and the result is true. No rank waits where none has. Fails where this rank has read slices in that
  // forward that another one has written before. By collectives each rank sends its slice when it has come as far, and
  // nobody has to meet.
  virtual bool meet_writes(bool /*wrote*/, int64_t /*forward*/) { return false; }
  // This rank's forward has ended; the user is about to write to slices of this rank, which waits until others' have.
  virtual void end_forward() {}
  virtual void before_slice_write() {}
  // The gathered values are others than the slices, as far as that can be known without the other ranks.
  virtual bool differs(const ShardedParam& param) { return param.own_part_differs(); }
  // Around a change of shards, which every rank makes: nobody reads them any more; what is there now is valid.
  virtual void before_write() = 0;
  virtual void after_write() = 0;
  // This rank gathers nothing until the others have come as far. Before anything else that all ranks do together.
  virtual void drain() {}
  virtual const char* name() const = 0;

  GatherBuffers& buffers() { return buffers_; }
  int64_t gathered_elements() const { return gathered_; }  // received from other ranks
  int64_t collectives() const { return collectives_; }     // started for gathers, exchanges not among them
  int64_t exchanges() const { return exchanges_; }         // in which ranks said what they want
  void reset_counters() { gathered_ = collectives_ = exchanges_ = 0; }

 protected:
  // Those that do not show such values, each once.
  static std::vector<ShardedParam*> absent(const std::vector<ShardedParam*>& params, Values values);
  // Each parameter becomes its buffer, or takes the values of it; who watches their status is asked in once for all.
  static void take_full(const std::vector<std::pair<ShardedParam*, at::Tensor>>& params, Values values);
  static void prefetch(const std::vector<ShardedParam*>& params, Values values) {
    for (const ShardedParam* param : params)
      if (param->row_elsewhere(values) && param->status() == ParamStatus::kNotAvailable) param->prefetch();
  }
  // Values that a refresh brings.
  static Values refreshed(const ShardedParam& param, Values values) {
    return param.resolved(param.exact_holders > 0 ? Values::kExact : values);
  }
  void refresh_together(comm::Communicator& communicator, const std::vector<ShardedParam*>& params, Values values);

  GatherBuffers buffers_;
  int64_t gathered_ = 0, collectives_ = 0, exchanges_ = 0;
};
using ShardSourcePtr = std::shared_ptr<ShardSource>;

// Every gather is a collective that all ranks issue in the same order: while a model is being built.
ShardSourcePtr collective_source(comm::CommunicatorPtr communicator);

// The objects that the source of an engine is made of.
struct SourceParts {
  std::vector<ShardedParamPtr> params;  // of all groups, numbered alike on all ranks
  // The ranks of the first group are those that agree: they include the others that this rank meets.
  std::vector<GatherGroup> groups;
  std::shared_ptr<storage::ShardStorage> storage;
};

// Adding a source is adding a file with a ShardSourceRegistration. An engine has the first registered source, by
// `order`, that fits on all ranks; a space rule may name another one (SpaceAxes::source).
struct ShardSourceRow {
  std::string name;
  int order;                         // lower ones are asked first
  bool (*fits)(const SourceParts&);  // on this rank; null: always
  ShardSourcePtr (*make)(SourceParts);
};

struct ShardSourceRegistration {
  explicit ShardSourceRegistration(ShardSourceRow row);
};

// `on_all(here)`: whether it is true on all ranks, which call it together. Fails where `named` is unknown, or does not
// fit.
ShardSourcePtr source_of(SourceParts parts, const std::string& named, const std::function<bool(bool)>& on_all);

// Collectives in a learned order.
ShardSourcePtr scheduled_source(std::vector<ShardedParamPtr> params, std::vector<GatherGroup> groups,
                                std::shared_ptr<storage::ShardStorage> storage);

}  // namespace ds::zero
