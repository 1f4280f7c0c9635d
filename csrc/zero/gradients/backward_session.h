// One backward after the other: hooks on parameters, graph hooks around the model, when gradients are reduced.
//
// [Note: the factor of a user's backward]
// A backward that the user runs starts with the loss as it is, so its gradients are multiplied by a factor, loss scale
// over accumulation steps. They are where they arrive at a parameter: a loss may have other terms than outputs of
// forward, such as a penalty on weights, and may be a function of gradients (torch.autograd.grad with create_graph).
// The loss scale is there for the small 16-bit gradients of activations, though, and has to come in at the outputs of
// forward. Then a gradient that reaches a parameter by another way would lack it: such a loss is refused.
//
// torch.autograd.grad, which leaves nothing in .grad of parameters, is not a backward, and its results have no factor.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "zero/gradients/accumulator_hooks.h"
#include "zero/gradients/grad_reducer.h"
#include "zero/gathers/param_gatherer.h"
#include "zero/rank_failures.h"
#include "zero/gradients/window.h"

namespace ds::zero {

class BackwardSession {
 public:
  // `self`: a pointer to this that keeps its engine alive, for hooks that outlive it. `gatherer` may be filled later.
  BackwardSession(ParamStore& store, GradReducer& grads, std::shared_ptr<Window> window,
                  const std::unique_ptr<ParamGatherer>& gatherer, const RankFailures& failures,
                  std::function<std::weak_ptr<BackwardSession>()> self)
      : store_(store),
        grads_(grads),
        window_(std::move(window)),
        gatherer_(gatherer),
        failures_(failures),
        self_(std::move(self)),
        hooked_(store.size(), -1) {}

  void register_hooks();  // hooks on the parameters that require grad now; the calls below do it by themselves

  // A backward that the caller runs between begin and end, or gives up with abort. With a `root` that it starts from,
  // end is called by itself when the outermost backward of that root ends.
  void begin(bool reduce, const at::Tensor& root = {});
  void end();
  bool abort();
  // abort() of a backward that has raised on this rank, perhaps on no other: it takes part in what the others do until
  // theirs ends, so that it ends with an error there, too. Where it cannot, all their collectives fail, and it throws.
  bool abort_together();

  // A forward that trains has returned `outputs`. They get hooks, so that a backward that the user runs on them calls
  // begin and end by itself. Returns the number of this forward (Window::forwarded).
  int64_t forwarded(const std::vector<at::Tensor>& outputs);
  // Returns `input` for use inside the model. Its gradient is divided by the loss scale before it leaves the model.
  at::Tensor hook_input(const at::Tensor& input);

  const std::shared_ptr<Window>& window() const { return window_; }

  void finish();  // before a step: what backwards have left is reduced
  // Once for each micro-step in which begin was not called. Returns true when there was no backward by the user either,
  // and no gradient waits for its reduction. With `reduce` this rank then takes part in the reduction that the other
  // ranks' backward starts.
  bool join(bool reduce);
  void clear_grads();
  // Takes the gradients that the user, or a backward without hooks, has left in .grad as this rank's contribution.
  void adopt_grads();
  void release() { hooks_.clear(); }

 private:
  at::Tensor entering(const at::Tensor& grad) const;
  bool accumulates() const;
  bool only_through_outputs() const;
  void hook_outputs(const std::vector<at::Tensor>& outputs, int64_t forward);
  at::Tensor enter(const at::Tensor& grad, int64_t forward);
  void queue_gathers_end();
  void leave_root();
  void queue_end();

  ParamStore& store_;
  GradReducer& grads_;
  const std::shared_ptr<Window> window_;
  const std::unique_ptr<ParamGatherer>& gatherer_;
  const RankFailures& failures_;
  const std::function<std::weak_ptr<BackwardSession>()> self_;
  std::vector<int64_t> hooked_;  // of each parameter its number among the hooks, or -1
  at::Tensor root_;              // of a backward of the caller that ends by itself; with a hook
  unsigned root_hook_ = 0;
  bool gathers_end_queued_ = false;
  AccumulatorHooks hooks_;  // last: gone before what they call
};

}  // namespace ds::zero
