"""The op ``fused_lion``: Lion over lists of tensors, on the CPU and on GPUs."""

from deepspeed.ops.op_builder.prebuilt.multi_tensor import is_wanted
from deepspeed.ops.op_builder.prebuilt.stepper import Stepper

_stepper = Stepper("lion", "fused Lion")


def multi_tensor_lion(chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, step, weight_decay):
    """Update number ``step`` of all parameters, in place; ``tensor_lists`` is [gradients, parameters, exp_avgs].
    ``chunk_size`` and ``noop_flag`` as in ``multi_tensor_adam``."""
    hyper = dict(lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay)
    if is_wanted("multi_tensor_lion", ("gradients", "parameters", "exp_avgs"), tensor_lists, noop_flag):
        grads, params, *moments = tensor_lists
        _stepper.step(params, grads, moments, hyper, step)
