"""The base of the ``Fused...`` classes: parameters on any device, and arguments that only old callers pass."""

import torch

from deepspeed.ops.native_optimizer import NativeOptimizer, loss_of


class FusedOptimizer(NativeOptimizer):
    """One multi-tensor launch per parameter group and device, on the device the parameters are on.

    CUDA parameters are updated on torch's current stream without a synchronisation, CPU parameters on
    ``torch.get_num_threads()`` threads. States are fp32. ``set_grad_none``: ``zero_grad`` drops gradients instead of
    filling them with zeros.
    """

    def __init__(self, params, defaults, set_grad_none=True, **options):
        super().__init__(params, defaults, **options)
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
                f"{type(self).__name__}.step does not take {', '.join(refused)}: gradients are read from the "
                "parameters. Unscale them before the step; with a GradScaler, call scaler.step(optimizer), which does "
                "it."
            )
        if self.fused_state is None:
            return super().step(closure)
        loss = loss_of(closure)
        self.fused_state.step()
        return loss
