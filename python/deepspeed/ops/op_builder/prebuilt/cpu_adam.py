"""The op ``cpu_adam``: Adam and AdamW on one tensor at a time, by number of the optimizer."""

import torch

from deepspeed.ops.adam.rollback import before_update
from deepspeed.ops.op_builder.prebuilt.stepper import Handles

_handles = Handles("adam", "CPU Adam", "create_adam")


def create_adam(optimizer_id, lr=1e-3, betas0=0.9, betas1=0.999, eps=1e-8, weight_decay=0.0, adamw_mode=True,
                should_log=False):  # fmt: skip
    """Makes the optimizer ``optimizer_id``. ``adamw_mode`` (decay apart from the gradient) holds for its life."""
    return _handles.create(optimizer_id, adamw_mode=bool(adamw_mode))


def adam_update(optimizer_id, step, lr, beta1, beta2, epsilon, weight_decay, bias_correction, params, grads, exp_avg,
                exp_avg_sq):  # fmt: skip
    """Update number ``step`` (from 1) of the tensor ``params`` and its moments, in place."""
    stepper, settings = _handles.get(optimizer_id)
    hyper = dict(lr=lr, beta1=beta1, beta2=beta2, eps=epsilon, weight_decay=weight_decay,
                 bias_correction=bool(bias_correction), decoupled=settings["adamw_mode"])  # fmt: skip
    stepper.step([params], [grads], [[exp_avg], [exp_avg_sq]], hyper, step)
    return 0


@torch.no_grad()
def adam_rollback(optimizer_id, step, lr, beta1, beta2, epsilon, weight_decay, bias_correction, params, grads, exp_avg,
                  exp_avg_sq):  # fmt: skip
    """Undoes update number ``step`` in place: Adam's formulas solved for the values before it, in fp64.

    Raises:
        ValueError: step is below 1.
        RuntimeError: the update was not finite, so nothing tells what was before; nothing is changed.
    """
    _, settings = _handles.get(optimizer_id)
    if step < 1:
        raise ValueError(f"adam_rollback undoes update number {step}, but updates count from 1.")
    old = before_update(params, grads, exp_avg, exp_avg_sq, step, lr, beta1, beta2, epsilon, weight_decay,
                        bias_correction, settings["adamw_mode"])  # fmt: skip
    if old is None:
        raise RuntimeError(f"update number {step} cannot be rolled back: a value in it is not finite.")
    for tensor, values in zip((params, exp_avg, exp_avg_sq), old):
        tensor.copy_(values)
    return 0


destroy_adam = _handles.destroy
