"""DeepSpeedCPUAdagrad: Adagrad (Duchi, Hazan & Singer 2011) for parameters in host memory."""

from deepspeed.ops.adagrad.sparse_rows import SparseRows
from deepspeed.ops.cpu_optimizer import CPUOptimizer


class DeepSpeedCPUAdagrad(SparseRows, CPUOptimizer):
    """Adagrad for parameters in host memory; the formula is in ``csrc/kernels/adagrad.h``.

    Args:
        model_params: iterable of parameters (fp32, bf16 or fp16) or of parameter groups.
        lr, eps: as in torch.optim.Adagrad without a decay of the learning rate.
        weight_decay: ``weight_decay * p`` is added to the gradient.
        amsgrad: not implemented, must be False.
        fp32_optimizer_states: keep the states of 16-bit parameters in fp32; False keeps them in the parameter's dtype.

    A gradient that is sparse updates the rows that it has, and their states, only.

    Raises:
        ValueError: a hyperparameter is out of range.
        RuntimeError: ``amsgrad=True``; a sparse gradient together with ``weight_decay``.
        AssertionError: at a step, where a parameter is not in host memory.
    """

    rule = "adagrad"
    optimizer_id = 0  # of the next object; an object's own is opt_id

    def __init__(self, model_params, lr=0.01, eps=1e-10, weight_decay=0, amsgrad=False, fp32_optimizer_states=True):
        super().__init__(
            model_params, dict(lr=lr, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad), fp32_optimizer_states
        )
