"""Base classes of all optimizers that an engine wraps. Lightning looks for these classes with isinstance."""

import torch

from deepspeed.zero.core import aborted_together


class DeepSpeedOptimizer:
    """Base of all wrapped optimizers. Not a ``torch.optim.Optimizer``: it has one inside, ``optimizer``."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """Base of the wrapped optimizers that shard their states. ``engine`` is the one that owns it, or None."""

    engine = None
    _is_boundary = True

    def is_gradient_accumulation_boundary(self):
        """Whether gradients are complete after the next backward: the engine's word where there is one."""
        return self._is_boundary if self.engine is None else self.engine.is_gradient_accumulation_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary):
        """Decides by hand whether the next backward is the last one before a step."""
        self._is_boundary = is_boundary
        if self.engine is not None:
            self.engine.set_gradient_accumulation_boundary(is_boundary)

    def needs_scaler(self):
        """True when a loss must be scaled before a backward that the user runs."""
        return False

    def scale_if_loss(self, value):
        """``value`` times the loss scale when it is a scalar that needs gradients; anything else as it is."""
        is_loss = torch.is_tensor(value) and value.requires_grad and value.numel() == 1
        return value.float() * self.loss_scale if is_loss and self.needs_scaler() else value

    def get_param_comm_dtype(self, param):
        """The dtype in which the gradient of ``param`` travels between ranks."""
        if self.engine is None:
            grads = self.core.grads()
            return grads[0].dtype if grads else param.dtype
        return self.engine._wire_dtype or self.engine.kept_grad_dtype(param)

    # ---- universal checkpoints -------------------------------------------------------------------------------------
    def load_hp_checkpoint_state_from_checkpoint_dir(self, lp_groups_name, checkpoint_dir):
        """Masters, states, steps and hyperparameters of this rank from the folder of a universal checkpoint.

        ``lp_groups_name``: the attribute with the lists of parameters, "bit16_groups". ``engine.load_checkpoint`` does
        this and more; every rank calls it.
        """
        params = [param for group in getattr(self, lp_groups_name) for param in group]
        self._restore_universal(checkpoint_dir, params)

    def _restore_universal(self, checkpoint_dir, params=None, weights=True, states=True):
        if self.engine is None:
            raise RuntimeError(
                "only an optimizer that deepspeed.initialize has made reads a universal checkpoint by itself; for "
                "parameters of your own call deepspeed.checkpoint.enable_universal_checkpoint and their "
                "load_hp_checkpoint_state"
            )
        self.engine.restore_universal(checkpoint_dir, params, weights, states)

    # ---- a backward that somebody else runs ------------------------------------------------------------------------
    def backward_prologue(self):
        """Before a backward: from here on gradients are collected."""
        self.core.begin_backward(self.is_gradient_accumulation_boundary() or self.partition_gradients)

    def backward_epilogue(self, **kwargs):
        """After it: what has not been reduced is."""
        self.core.end_backward()

    def backward(self, loss, **kwargs):
        """Scales ``loss`` and runs its backward with ``kwargs`` (``retain_graph``, ``create_graph``)."""
        self.backward_prologue()
        with aborted_together(self.core):
            (loss.float() * self.loss_scale).backward(**kwargs)
        self.backward_epilogue()
