"""Gradients on their way from bf16 (``param.grad``) to fp32, for training loops that run backward themselves."""

import contextlib

import torch

from deepspeed.utils.forwarding import forwarded


class HighPrecisionGrads:
    """Mixed into an optimizer of ZeRO stage 1, whose parameters are "lp"; fp32 masters and gradients are "hp"."""

    bf16_groups = forwarded("bit16_groups", False)

    def create_grad_acc_hooks(self):
        """From now on a gradient is added to the fp32 ones, and ``.grad`` freed, as soon as backward has made it."""
        self.core.forwarded([], False, 1.0, 1.0)

    def backward_epilogue(self, update_hp_grads=True, clear_lp_grads=False, **bwd_kwargs):
        """After it. Without ``update_hp_grads`` what lies in ``.grad`` stays there."""
        super().backward_epilogue(**bwd_kwargs)
        if update_hp_grads:
            self.update_hp_grads(clear_lp_grads=clear_lp_grads)

    @torch.no_grad()
    def update_hp_grads(self, clear_lp_grads=False):
        """Adds what plain backwards have left in ``.grad`` to the fp32 gradients of this rank, and frees it."""
        self._take_lp_grads(self._params)

    @torch.no_grad()
    def accumulate_hp_grads_and_remove_lp(self, lp_param, group_idx, param_idx):
        """The same for one parameter: number ``param_idx`` of group ``group_idx``."""
        index = sum(len(group) for group in self.bit16_groups[:group_idx]) + param_idx
        if not 0 <= index < len(self._params) or self._params[index] is not lp_param:
            raise ValueError(f"the parameter {tuple(lp_param.shape)} is not number {param_idx} of group {group_idx}")
        self._take_lp_grads([lp_param])

    def _take_lp_grads(self, wanted):
        wanted = set(wanted)
        with self._kept_apart(param for param in self._params if param not in wanted):
            if self.partition_count[0] == 1:
                # One rank: its gradients are the reduced ones, which .grad would replace.
                used = self.core.used()
                for number, (index, _, _) in enumerate(self.core.pieces()):
                    param = self._params[index]
                    if param.grad is not None and used[index]:
                        with self.core.piece("grad", 0, number, "update") as grad:
                            grad.add_(param.grad.reshape(grad.shape))
                        param.grad = None
            self.core.adopt_grads()

    @contextlib.contextmanager
    def _kept_apart(self, params):
        """Inside, ``params`` have no ``.grad``; they get it back."""
        grads = {param: param.grad for param in params if param.grad is not None}
        self.free_grad_in_param_list(grads)
        yield
        for param, grad in grads.items():
            param.grad = grad

    def get_grads_for_reduction(self):
        """``(gradients, gradients of experts)``: a list of this rank's fp32 gradients, views, and an empty dict."""
        return self.get_grads_for_norm()

    def get_grads_for_norm(self, for_clipping=False):
        """``(gradients, gradients of experts)`` that the norm of this rank's share is made of, and an empty dict."""
        return [grad for grads in self.averaged_gradients.values() for grad in grads], {}

    def clear_hp_grads(self):
        """Forgets the fp32 gradients; what lies in ``.grad`` stays."""
        with self._kept_apart(self._params):
            self.core.clear_grads()

    @torch.no_grad()
    def clear_lp_grads(self, set_to_none=False):
        """Zeroes ``.grad`` where there is one, or takes it away."""
        for param in self._params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def zero_grad(self, set_to_none=True):
        self.clear_lp_grads(set_to_none=True)
        super().zero_grad(set_to_none=set_to_none)
