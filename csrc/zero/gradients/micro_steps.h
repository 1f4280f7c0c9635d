// Counts micro-steps, and the forwards in them that a backward has reached.
//
// A micro-step is one call of engine.step(), in a pipeline one micro-batch. It may have several forwards and backwards.
#pragma once
#include <cstdint>
#include <mutex>
#include <set>
#include <vector>

namespace ds::zero {

class MicroSteps {
 public:
  // A forward that trains has ended. Returns its number; the first one has number 1. `seen`: whether its outputs are
  // known, so that a backward that reaches them is.
  int64_t add_forward(bool seen);
  void add_backward(bool own);
  void reach(int64_t forward);  // the backward that runs has come to an output of this forward; any thread
  void keep_reached();          // it has ended
  void drop_reached();          // it has raised
  // The micro-step ends, and `count` of them are counted. At a `boundary` the window ends, too.
  void end(bool boundary, int64_t count);
  void restart();  // a new window; what was counted in this one is forgotten
  // Sets the counter of all micro-steps. How many of them the window has stays.
  void set_total(int64_t total);

  int64_t total() const { return total_; }
  int64_t window_begin() const { return begin_; }           // total() where the window began
  int64_t index() const { return total_ - begin_; }         // of this micro-step in its window
  bool has_forward() const { return micro_.forwards > 0; }  // in this micro-step
  bool has_backward() const { return micro_.backwards > 0; }
  bool has_own_backward() const { return micro_.own; }
  // Numbers of the forwards of this micro-step that a backward has reached, in order. Evaluation, and forwards that
  // raised or were made again, are not among them.
  std::vector<int64_t> reached() const;
  // Micro-batches whose gradients the window has: forwards that a backward has reached. A micro-step with a backward
  // whose forward is not known counts as one.
  int64_t micro_batches() const;
  // Micro-batches that were trained on since the last step at a boundary.
  int64_t trained() const;

 private:
  struct MicroStep {
    int64_t forwards = 0, backwards = 0;
    bool own = false;      // one of the backwards was the engine's
    bool unknown = false;  // a forward has hidden its outputs
  };

  int64_t total_ = 0, begin_ = 0;
  int64_t earlier_ = 0;  // micro_batches() of the earlier micro-steps of this window
  int64_t number_ = 0;   // of the last forward
  MicroStep micro_;
  mutable std::mutex mutex_;  // of what follows
  std::set<int64_t> reached_, reaching_;
};

}  // namespace ds::zero
