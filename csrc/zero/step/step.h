// One optimizer step: what it is told, and what it says.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "optim/loss_scaler.h"

namespace ds::zero {

struct StepInputs {
  float loss_scale = 1.0f;  // the factor by which gradients are too large
  float max_norm = 0.0f;    // they are clipped to; 0: not
  bool check = false;       // gradients that are not finite skip the step
  bool name_nonfinite =
      false;  // StepReport::nonfinite is wanted, which costs a walk over gradients that are not finite
  // The rules by which the loss scale moves with this step, and its state.
  std::optional<std::pair<optim::LossScaleRules, optim::LossScaleState>> scaler;
  // Called before anything has changed: the learning-rate schedule moves. Whether the step is made is not known yet, so
  // that the host does not wait for the device: StepReport::skipped says whether to undo the call. What it throws
  // leaves weights, states and gradients as they were.
  std::function<void()> before_update;
  // before_update is called when the norm is known (Stepper::report), and not in a step that is skipped.
  bool norm_first = false;
  // The hyperparameters of each parameter group, in the order of its rule. Or, for an optimizer that lives outside: its
  // parameters, one for each piece, and what updates them from their .grad (unscaled and clipped); not called when the
  // step is skipped.
  std::vector<std::vector<double>> hyper;
  std::vector<at::Tensor> masters;
  std::function<void()> outside;
};

struct StepReport {
  double norm;       // of the unscaled gradients over all ranks
  float grad_scale;  // factor of unscaling and clipping
  bool skipped;      // gradients were not finite, nothing was touched
  // If the norm is not finite: names of parameters whose gradients on this rank are "inf" or "nan".
  std::vector<std::pair<std::string, std::string>> nonfinite{};
  // Parameters into which the user has written since the last step, see [Note: what the user has written counts]; of
  // which this rank owns something.
  std::vector<std::string> written{};
  // The loss scale of the next step. Unset without a scaler, or if its rules raise. Python then calls the rules again
  // to raise the error.
  std::optional<optim::LossScaleState> loss_scale{};
};

}  // namespace ds::zero
