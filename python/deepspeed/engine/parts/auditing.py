"""The key ``zero_optimization.audit_steps``: the first steps of an engine are compared with a plain process."""

from deepspeed.engine.members import engine_parts
from deepspeed.zero.audit import Audit


@engine_parts.add("_auditing")
class Auditing:
    """A part of the engine. ``audit`` is None where none runs."""

    def __init__(self, engine):
        self.engine = engine
        self.audit = None

    def start(self):
        steps = self.engine._config.zero_config.audit_steps
        if steps and self.engine._trains:
            self.audit = Audit(self.engine, steps)

    def forget(self):
        """The gradients of this step are forgotten."""
        if self.audit is not None:
            self.audit.forget()

    def before_step(self):
        if self.audit is not None:
            self.engine.core.finish_backward()
            self.audit.before_step()

    def after_micro_step(self, boundary):
        if self.audit is not None and boundary:
            self.audit.after_step(self.engine.was_step_applied())
            self.audit = None if self.audit.over else self.audit
