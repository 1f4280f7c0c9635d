"""FusedAdam: Adam and AdamW with one kernel call for all tensors of a parameter group, on the device they are on."""

import torch

from deepspeed.ops.adam.native_adam import NativeAdam


class FusedAdam(NativeAdam):
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

    def __init__(
        self,
        params,
        lr=0.001,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-08,
        adam_w_mode=True,
        weight_decay=0.0,
        amsgrad=False,
        set_grad_none=True,
    ):
        if amsgrad:
            raise RuntimeError(
                "FusedAdam does not implement AMSGrad: pass amsgrad=False, or use torch.optim.AdamW(..., amsgrad=True)."
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults, adamw=adam_w_mode, fp32_states=True)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none

    def zero_grad(self):
        """Drop all gradients (``set_grad_none=True``) or fill them with zeros."""
        super().zero_grad(set_to_none=bool(self.set_grad_none))

    @torch.no_grad()
    def step(self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None, grad_scaler=None):
        """One update of every parameter that has a gradient.

        Args:
            closure: recomputes the loss; it runs with gradients enabled.
            grads, output_params, scale, grad_norms, grad_scaler: for old callers only, must be None.

        Returns:
            what ``closure`` returns, or None.

        Raises:
            RuntimeError: one of the last five is given.
        """
        given = {
            "grads": grads,
            "output_params": output_params,
            "scale": scale,
            "grad_norms": grad_norms,
            "grad_scaler": grad_scaler,
        }
        refused = [name for name, value in given.items() if value is not None]
        if refused:
            raise RuntimeError(
                f"FusedAdam.step does not take {', '.join(refused)}: gradients are read from the parameters. Unscale "
                f"them before the step; with a GradScaler, call scaler.step(optimizer), which does it."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_all()
        return loss
