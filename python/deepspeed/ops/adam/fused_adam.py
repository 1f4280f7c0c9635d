"""FusedAdam: Adam and AdamW with one kernel call for all tensors of a parameter group, on the device they are on.

The update is Adam (Kingma & Ba 2015, algorithm 1) or AdamW (Loshchilov & Hutter 2019, algorithm 2); the exact order
of operations is in ``csrc/kernels/adam.h``.
"""

from deepspeed.ops.fused_optimizer import FusedOptimizer
from deepspeed.ops.native_optimizer import adam_defaults


class FusedAdam(FusedOptimizer):
    """Adam (``adam_w_mode=False``) or AdamW; one multi-tensor launch per parameter group and device.

    CUDA parameters are updated on torch's current stream without a synchronisation, CPU parameters on
    ``torch.get_num_threads()`` threads. The moments are fp32.

    Args:
        params: iterable of parameters (fp32, bf16 or fp16) or of parameter groups.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        bias_correction: divide the moments by ``1 - beta ** step``.
        adam_w_mode: decoupled weight decay; False adds ``weight_decay * p`` to the gradient.
        amsgrad: not implemented, must be False.
        set_grad_none: ``zero_grad`` drops gradients instead of filling them with zeros.

    Raises:
        ValueError: a hyperparameter is out of range.
        RuntimeError: ``amsgrad=True``, a sparse gradient, or CUDA parameters where no CUDA kernels were built.
    """

    rule = "adam"

    def __init__(self, params, lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-08, adam_w_mode=True,
                 weight_decay=0.0, amsgrad=False, set_grad_none=True):  # fmt: skip
        if amsgrad:
            raise RuntimeError(
                "FusedAdam does not implement AMSGrad: pass amsgrad=False, or use torch.optim.AdamW(..., amsgrad=True)."
            )
        # Saved groups have always had the key "step"; updates are counted for each parameter.
        defaults = {**adam_defaults(lr, bias_correction, betas, eps, weight_decay), "step": 0}
        super().__init__(params, defaults, set_grad_none, decoupled=bool(adam_w_mode))
        self.adam_w_mode = 1 if adam_w_mode else 0
