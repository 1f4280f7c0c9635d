"""FusedAdagrad: Adagrad with one kernel call for all tensors of a parameter group, on the device they are on."""

from deepspeed.ops.adagrad.sparse_rows import SparseRows
from deepspeed.ops.fused_optimizer import FusedOptimizer


class FusedAdagrad(SparseRows, FusedOptimizer):
    """Adagrad on the CPU or a GPU. Arguments and errors are those of ``DeepSpeedCPUAdagrad``; ``set_grad_none`` as in
    ``FusedAdam``."""

    rule = "adagrad"

    def __init__(self, params, lr=0.01, eps=1e-10, weight_decay=0.0, amsgrad=False, set_grad_none=True):
        super().__init__(params, dict(lr=lr, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad), set_grad_none)
