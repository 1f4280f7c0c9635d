"""The key ``zero_optimization.audit_steps``: in the first steps of an engine what it did is done once more without
sharding, and compared. It is csrc/zero/gradients/audit.h; when it is over, its hooks are gone."""

import contextlib
import functools
import weakref

from deepspeed import _native
from deepspeed.engine.members import Part, engine_parts
from deepspeed.log import log_dist
from deepspeed.zero.audit import AuditError, tolerance


@engine_parts.add("_auditing")
class Auditing(Part):
    """A part of the engine. Any difference raises AuditError on every rank, naming the parameter, the rank and the
    figures. ``audit`` is None where none runs."""

    audit = None

    def start(self):
        engine = self.engine
        self._steps = self._left = engine._config.zero_config.audit_steps
        if not self._steps or not engine._trains:
            return
        params = [param for group in engine.trained_groups for param in group]
        kinds = {kind for param in params for kind in (param.dtype, engine.kept_grad_dtype(param))}
        ranks = _native._C.Communicator(engine.parallel.dp_group) if engine.parallel.dp_world_size > 1 else None
        self.audit = _native._C.Audit(
            engine.core,
            ranks,
            rank=engine.global_rank,
            tolerance=tolerance(kinds | {engine.communication_data_type}),
            update=functools.partial(_updated, weakref.ref(engine)),
        )
        self._handles = [
            param.register_hook(functools.partial(self.audit.add, index))
            for index, param in enumerate(params)
            if param.requires_grad
        ]

    def forget(self):
        """The gradients of this step are forgotten."""
        if self.audit is not None:
            self.audit.forget()

    def before_step(self):
        if self.audit is None:
            return
        engine, optimizer, groups = self.engine, self.engine.basic_optimizer, []
        engine.core.finish_backward()
        if engine.stepping.fused:
            found = optimizer.param_groups
            groups = [(optimizer.rule_of(g), optimizer.rule_args(g), optimizer.magnification(g)) for g in found]
        with _told():
            self.audit.before_step(
                number=engine.global_steps,
                loss_scale=engine.stepping.loss_scale,
                clip=engine.stepping.clip,
                average=engine.gradient_average,
                groups=groups,
            )

    def after_micro_step(self, boundary):
        if self.audit is None or not boundary:
            return
        norm = self.engine.stepping.norm if self.engine.mp_world_size == 1 else float("nan")
        with _told():
            self.audit.after_step(self.engine.was_step_applied(), norm)
        self._left -= 1
        if self._left == 0:
            for handle in self._handles:
                handle.remove()
            self.audit = None
            log_dist(f"audit: {self._steps} steps agree with a plain process", ranks=[0])


@contextlib.contextmanager
def _told():
    """Inside, what the audit has found is an AuditError."""
    try:
        yield
    except RuntimeError as error:
        if "audit of step" in str(error):
            raise AuditError(str(error)) from None
        raise


def _updated(engine, group, *args):
    """The update of a whole weight by one of our optimizers."""
    optimizer = engine().basic_optimizer
    return optimizer.updated(optimizer.param_groups[group], *args)
