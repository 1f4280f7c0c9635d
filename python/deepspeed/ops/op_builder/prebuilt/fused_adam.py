"""The op ``fused_adam``: Adam and AdamW over lists of tensors, on the CPU and on GPUs."""

from deepspeed.ops.op_builder.prebuilt.multi_tensor import is_wanted
from deepspeed.ops.op_builder.prebuilt.stepper import Stepper

_stepper = Stepper("adam", "fused Adam")


def multi_tensor_adam(chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step, mode, bias_correction,
                      weight_decay):  # fmt: skip
    """Update number ``step`` of all parameters, in place.

    ``tensor_lists`` is [gradients, parameters, exp_avgs, exp_avg_sqs]. ``mode`` 0 adds the decay to the gradient
    (Adam), 1 applies it to the parameter (AdamW). ``chunk_size`` is a wish about the launch that our kernels do not
    need. ``noop_flag``, a tensor, is read on the CPU only: nothing happens where it is not zero.
    """
    names = ("gradients", "parameters", "exp_avgs", "exp_avg_sqs")
    hyper = dict(lr=lr, beta1=beta1, beta2=beta2, eps=epsilon, weight_decay=weight_decay,
                 bias_correction=bool(bias_correction), decoupled=mode == 1)  # fmt: skip
    if is_wanted("multi_tensor_adam", names, tensor_lists, noop_flag):
        grads, params, *moments = tensor_lists
        _stepper.step(params, grads, moments, hyper, step)
