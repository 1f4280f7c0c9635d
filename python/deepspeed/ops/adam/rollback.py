"""Adam's formulas solved for the values before an update."""

import torch


def before_update(param, grad, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, weight_decay, bias_correction,
                  decoupled):  # fmt: skip
    """(param, exp_avg, exp_avg_sq) in fp64 as they were before update number ``step``; None where one is not finite."""
    new, grad, m, v = (tensor.double() for tensor in (param, grad, exp_avg, exp_avg_sq))
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = 1.0 - beta2**step if bias_correction else 1.0
    old = new + lr / correction1 * m / ((v / correction2).sqrt() + eps)
    if decoupled:
        old = old / (1.0 - lr * weight_decay)
    else:
        grad = grad + weight_decay * old
    old_m = (m - (1.0 - beta1) * grad) / beta1 if beta1 and step > 1 else torch.zeros_like(m)
    old_v = (v - (1.0 - beta2) * grad * grad) / beta2 if beta2 and step > 1 else torch.zeros_like(v)
    if not all(torch.isfinite(values).all() for values in (old, old_m, old_v)):
        return None
    return old, old_m, old_v.clamp_(min=0)
