"""The common behaviour of all optimizers that an engine wraps: groups, scale, backward, step.

Lightning looks for these classes with isinstance."""

import operator

import torch

from deepspeed.ops.by_name import rules_of
from deepspeed.utils.forwarding import answers_from, forwarded
from deepspeed.zero.core import aborted_together, build_core, writing
from deepspeed.zero.optimizers.restore import Restore
from deepspeed.zero.optimizers.stepping import Stepping, refuse_group
from deepspeed.zero.parameters.param_ranks import in_memory_order, numel_of

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def _of_piece(value, param, offset, numel, master):
    """The state of ``master`` for a state of ``param`` that an optimizer has from before (Adagrad makes it when it is
    constructed; an optimizer may have made steps, or loaded states)."""
    part = in_memory_order(value, param)[offset : offset + numel].reshape(master.shape)
    return part.to(master.dtype, copy=True) if value.dtype == param.dtype else part.clone()


# Masters take the model's current 16-bit weights, after those have been loaded.
@answers_from({"refresh_fp32_params": "core.refresh_master()"})
class DeepSpeedOptimizer:
    """Base of the optimizers that an engine wraps. Not a ``torch.optim.Optimizer``: it has one inside, ``optimizer``.

    ``optimizer`` updates what this rank owns of the fp32 masters: views of the core's flat buffers.

    ``low_precision_dtype`` is what the model computes with, fp32 included. The parameter groups of ``optimizer`` keep
    their identity, so schedulers made for them stay valid; only their ``params`` are replaced.
    """

    def _start(self, engine, scaler, clip_grad, **core_options):
        """Takes the core of ``engine``, or makes one of its own."""
        self.loss_scaler = scaler
        if engine is not None and hasattr(engine, "core_for_optimizer"):
            core, names, check, rank = engine.core_for_optimizer(self.optimizer)
        else:
            core, names = build_core(self.optimizer.param_groups, rules=rules_of(self.optimizer), **core_options)
            core.refresh_master()
            check, rank = self.low_precision_dtype != torch.float32, 0
        self.core = core
        self._take_masters()
        masters = [master for group in self.fp32_groups for master in group]
        self.stepping = Stepping(
            core, self.optimizer, masters, names, scaler=scaler, check=check, clip=clip_grad, rank=rank
        )

    def _take_masters(self):
        """Replaces the parameters of the inner optimizer by the masters that this rank owns."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        rows = [(position, param) for position, group in enumerate(groups) for param in group["params"]]
        self.fp32_groups = [[] for _ in groups]
        for (index, offset, numel), tensor in zip(self.core.pieces(), self.core.masters()):
            position, param = rows[index]
            master = torch.nn.Parameter(tensor, requires_grad=param.requires_grad)
            if param in state:
                state[master] = {
                    key: _of_piece(value.detach(), param, offset, numel, master)
                    if torch.is_tensor(value) and value.numel() == numel_of(param) and value.dim() > 0
                    else value
                    for key, value in state[param].items()
                }
            self.fp32_groups[position].append(master)
        for _, param in rows:
            state.pop(param, None)
        for group, masters in zip(groups, self.fp32_groups):
            group["params"] = masters

    # ---- what users read -------------------------------------------------------------------------------------------
    param_groups, state = forwarded("optimizer.param_groups"), forwarded("optimizer.state")
    overflow, _global_grad_norm = forwarded("stepping.overflow", False), forwarded("stepping.norm", False)
    clip_grad = forwarded("stepping.clip")

    dynamic_loss_scale = forwarded("loss_scaler.dynamic", False)

    def needs_scaler(self):
        """True when a loss must be scaled before a backward that the user runs."""
        return self.low_precision_dtype == torch.float16

    def get_lr(self):
        return self.optimizer.param_groups[0].get("lr", 0.0)

    def set_lr(self, lr):
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def override_loss_scale(self, loss_scale):
        """Fixes the current loss scale; a dynamic scaler goes on from there."""
        self.loss_scaler.cur_scale = loss_scale

    loss_scale = cur_scale = property(operator.attrgetter("stepping.loss_scale"), override_loss_scale)

    # ---- training --------------------------------------------------------------------------------------------------
    def backward(self, loss, create_graph=False, retain_graph=False):
        """Scales ``loss`` (a scalar) and runs its backward; gradients land in the flat buffers."""
        self.core.begin_backward()
        with aborted_together(self.core):
            (loss.float() * self.loss_scale).backward(create_graph=create_graph, retain_graph=retain_graph)
        self.core.end_backward()

    def step(self, closure=None):
        """Unscales, clips, updates and casts. Nothing changes when a gradient is not finite: see ``overflow``."""
        if closure is not None:
            raise ValueError(
                "closures are not supported: with a loss scale the gradients of a closure cannot be checked first"
            )
        self.stepping.begin()()
        return self.stepping.end()

    add_param_group = staticmethod(refuse_group)

    def zero_grad(self, set_to_none=True):
        self.core.clear_grads()

    def initialize_optimizer_states(self):
        for slot in range(len(self.core.slot_names())):
            self.core.slots(slot)

    # ---- state -----------------------------------------------------------------------------------------------------
    def _scaler_state(self):
        scaler, dynamic = self.loss_scaler, self.dynamic_loss_scale
        kept = ("last_overflow_iter", "scale_factor", "scale_window", "cur_hysteresis") if dynamic else ()
        return {
            "dynamic_loss_scale": dynamic,
            "cur_scale": self.loss_scale,
            "cur_iter": getattr(scaler, "cur_iter", 0),
            **{name: getattr(scaler, name) for name in kept},
        }

    def _restore(self, saved, with_states, with_masters, when_read=None):
        """Takes a ``SavedState``; masters from the model's weights unless ``with_masters``. Every rank calls it.
        ``when_read()`` is called when nothing more is read."""
        restore = Restore(self.stepping, [param for group in self.bit16_groups for param in group], saved)

        def check():
            pairs = zip(restore.names, restore.params) if with_masters else ()
            without = [name for name, param in pairs if numel_of(param) and not saved.pieces(name, "fp32")]
            if without:
                raise ValueError(f"{saved.origin()} has no fp32 weights of {', '.join(without[:3])}")
            restore.check(with_masters, with_states)

        def fill():
            if with_masters:
                restore.masters()
            else:
                self.core.refresh_master()
            if with_states:
                restore.states()
            restore.extra()

        if when_read is None:
            check()
        else:  # the others wait for their turn, and not at the beginning of a write, which waits for all
            try:
                check()
                fill()
            finally:
                when_read()
        with writing(self.core):
            if when_read is None:
                fill()
            self.core.publish()

    def destroy(self):
        if self.stepping.in_files is not None:
            self.stepping.in_files.close()
            self.stepping.in_files = None
        self.optimizer = None
        self.stepping.release()


class ZeROOptimizer(DeepSpeedOptimizer):
    """Base of the wrapped optimizers that shard their states. ``engine`` is the one that owns it, or None."""

    def is_gradient_accumulation_boundary(self):
        """Whether gradients are complete after the next backward: the engine's word where there is one."""
        if self.engine is not None:
            return self.engine.is_gradient_accumulation_boundary()
        return self.core.window.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary):
        """Decides by hand whether the next backward is the last one before a step."""
        if self.engine is not None:
            self.engine.set_gradient_accumulation_boundary(is_boundary)
        else:
            self.core.window.set_boundary(is_boundary)

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
        self.core.begin_backward()

    def backward_epilogue(self, **kwargs):
        """After it: what has not been reduced is."""
        self.core.end_backward()

    def backward(self, loss, **kwargs):
        """Scales ``loss`` and runs its backward with ``kwargs`` (``retain_graph``, ``create_graph``)."""
        self.backward_prologue()
        with aborted_together(self.core):
            (loss.float() * self.loss_scale).backward(**kwargs)
        self.backward_epilogue()
