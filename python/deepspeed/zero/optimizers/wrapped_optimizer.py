"""The common behaviour of all optimizers that an engine wraps: groups, scale, backward, step."""

import torch

from deepspeed.ops.by_name import rules_of
from deepspeed.utils.forwarding import answers_from, forwarded
from deepspeed.zero.core import aborted_together, build_core
from deepspeed.zero.optimizers.base_optimizer import DeepSpeedOptimizer
from deepspeed.zero.optimizers.stepping import Stepping, refuse_group
from deepspeed.zero.parameters.param_ranks import lies_in_rows

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def in_memory_order(value, param):
    """The elements of ``value``, which has the shape of ``param``, in the order in which ``param`` lies in memory: the
    order of pieces. Flat; a view where that is possible."""
    if lies_in_rows(param):
        return value.reshape(-1)
    ordered = torch.empty_strided(param.shape, param.stride(), dtype=value.dtype, device=value.device)
    return ordered.copy_(value).as_strided((value.numel(),), (1,))


def _of_piece(value, param, offset, numel, master):
    """The state of ``master`` for a state of ``param`` that an optimizer has made before its first step (Adagrad)."""
    part = in_memory_order(value, param)[offset : offset + numel].reshape(master.shape)
    return part.to(master.dtype, copy=True) if value.dtype == param.dtype else part.clone()


# Masters take the model's current 16-bit weights, after those have been loaded.
@answers_from({"refresh_fp32_params": "core.refresh_master()"})
class WrappedOptimizer(DeepSpeedOptimizer):
    """``optimizer`` updates what this rank owns of the fp32 masters: views of the core's flat buffers.

    ``low_precision_dtype`` is what the model computes with, fp32 included. The parameter groups of ``optimizer`` keep
    their identity, so schedulers made for them stay valid; only their ``params`` are replaced.
    """

    def _take_core(self, engine, **options):
        """The core of ``engine``, or one of its own: ``(core, names, check for overflow, rank)``."""
        if engine is not None and hasattr(engine, "core_for_optimizer"):
            return engine.core_for_optimizer(self.optimizer)
        core, names = build_core(self.optimizer.param_groups, rules=rules_of(self.optimizer), **options)
        core.refresh_master()
        return core, names, self.low_precision_dtype != torch.float32, 0

    def _start(self, core, names, check, rank, scaler, clip_grad):
        self.core = core
        self.loss_scaler = scaler
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
                    if torch.is_tensor(value) and value.numel() == param.numel() and value.dim() > 0
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

    @property
    def loss_scale(self):
        return self.stepping.loss_scale

    @loss_scale.setter
    def loss_scale(self, value):
        self.override_loss_scale(value)

    cur_scale = loss_scale

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

    # ---- training --------------------------------------------------------------------------------------------------
    def backward(self, loss, create_graph=False, retain_graph=False):
        """Scales ``loss`` (a scalar) and runs its backward; gradients land in the flat buffers."""
        self.core.begin_backward(True)
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

    def add_param_group(self, param_group):
        """Refused: see the message."""
        refuse_group(param_group)

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

    def destroy(self):
        if self.stepping.in_files is not None:
            self.stepping.in_files.close()
            self.stepping.in_files = None
        self.optimizer = None
        self.stepping.release()
