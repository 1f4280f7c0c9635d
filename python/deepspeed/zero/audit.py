"""The audit: for some steps, what the engine did is done once more without sharding, and compared. It is
csrc/zero/gradients/audit.h; when it is over, its hooks are gone."""

import functools
import weakref

import torch

from deepspeed import _native
from deepspeed.log import log_dist

_NARROW = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


class AuditError(RuntimeError):
    """The engine's gradients, norm, update or weights are not those of a plain process."""


class Audit:
    """Compares the first ``steps`` optimizer steps of ``engine``. Any difference raises AuditError on every rank,
    naming the parameter, the rank and the figures."""

    def __init__(self, engine, steps):
        self.engine = engine
        self.steps = self.left = steps
        params = [param for group in engine.trained_groups for param in group]
        kinds = {kind for param in params for kind in (param.dtype, engine.kept_grad_dtype(param))}
        narrow = [8 * _NARROW[kind] for kind in kinds | {engine.communication_data_type} if kind in _NARROW]
        ranks = _native._C.Communicator(engine.parallel.dp_group) if engine.parallel.dp_world_size > 1 else None
        self.native = _native._C.Audit(
            engine.core,
            ranks,
            rank=engine.global_rank,
            tolerance=max([1e-5, *narrow]),
            update=functools.partial(_updated, weakref.ref(engine)),
        )
        self.handles = [
            param.register_hook(functools.partial(self.native.add, index))
            for index, param in enumerate(params)
            if param.requires_grad
        ]

    @property
    def over(self):
        return self.left == 0

    def forget(self):
        """Gradients have been thrown away."""
        self.native.forget()

    def before_step(self):
        """Gradients are reduced; nothing has been updated."""
        engine, optimizer, groups = self.engine, self.engine.basic_optimizer, []
        if engine.stepping.fused:
            found = optimizer.param_groups
            groups = [(optimizer.rule_of(g), optimizer.rule_args(g), optimizer.magnification(g)) for g in found]
        self._run(
            self.native.before_step,
            number=engine.global_steps,
            loss_scale=engine.stepping.loss_scale,
            clip=engine.stepping.clip,
            average=engine.gradient_average,
            groups=groups,
        )

    def after_step(self, stepped):
        """The update is done, or was skipped."""
        norm = self.engine.stepping.norm if self.engine.mp_world_size == 1 else float("nan")
        self._run(self.native.after_step, stepped, norm)
        self.left -= 1
        if self.over:
            for handle in self.handles:
                handle.remove()
            log_dist(f"audit: {self.steps} steps agree with a plain process", ranks=[0])

    def _run(self, call, *args, **kwargs):
        try:
            call(*args, **kwargs)
        except RuntimeError as error:
            if "audit of step" in str(error):
                raise AuditError(str(error)) from None
            raise


def _updated(engine, group, *args):
    """The update of a whole weight by one of our optimizers."""
    optimizer = engine().basic_optimizer
    return optimizer.updated(optimizer.param_groups[group], *args)
