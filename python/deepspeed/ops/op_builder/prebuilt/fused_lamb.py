"""The op ``fused_lamb``: LAMB on one tensor at a time, on the CPU and on GPUs."""

import torch

from deepspeed.ops.op_builder.prebuilt.stepper import Stepper

_stepper = Stepper("lamb", "fused LAMB")


def lamb(p, p_copy, exp_avg, exp_avg_sq, grad, lr, beta1, beta2, max_coeff, min_coeff, eps, combined_scale, step, mode,
         bias_correction, weight_decay):  # fmt: skip
    """Update number ``step`` (from 1) of ``p`` and its moments, in place.

    ``p_copy``, if it has elements, gets a copy of the result in its own dtype. ``combined_scale`` is what the gradient
    is divided by. ``mode`` 0 puts ``eps`` under the square root, 1 adds it to the root.

    Returns:
        the trust ratio |p| / |u| within [min_coeff, max_coeff], fp32 of shape (1,) on the device of ``p``; 1 where one
        of the norms is zero.
    """
    grad = grad if combined_scale == 1 else grad / combined_scale
    hyper = dict(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, min_coeff=min_coeff,
                 max_coeff=max_coeff, eps_inside_sqrt=mode == 0, bias_correction=bool(bias_correction))  # fmt: skip
    _stepper.step([p], [grad], [[exp_avg], [exp_avg_sq]], hyper, step)
    if p_copy is not None and p_copy.numel() > 0:
        p_copy.copy_(p)
    if p.numel() == 0:
        return torch.ones(1, device=p.device)
    weight, update = _stepper.sums()[0].sqrt()
    ratio = (weight / update).clamp(min_coeff, max_coeff)
    return torch.where((weight == 0) | (update == 0), torch.ones_like(ratio), ratio).float().reshape(1)
