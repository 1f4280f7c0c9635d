"""The step of an engine: at an accumulation boundary the optimizer's, else a count."""

from deepspeed.comm import comms_log
from deepspeed.config.sections import OffloadStateTypeEnum
from deepspeed.engine.members import Part, engine_parts, member, run_hooks
from deepspeed.engine.scheduling import next_move


@engine_parts.add("_steps")
class Steps(Part):
    """A part of the engine."""

    applied = False  # whether the last step has changed weights
    norm = None  # 2-norm of the gradients of the last step, before clipping; None before the first step

    @member
    def loss_scale(self):
        """The loss scale in use now; 1.0 without fp16."""
        return getattr(self.engine.optimizer, "loss_scale", 1.0)

    @member
    def get_lr(self):
        """The learning rate of each parameter group; 0.0 of a group without ``lr``, [] without an optimizer."""
        return [group.get("lr", 0.0) for group in getattr(self.engine.optimizer, "param_groups", ())]

    @member
    def get_type(self):
        return [type(self.engine.basic_optimizer).__name__]

    @member
    def get_mom(self):
        """Momentum of each group: ``betas`` for Adam-like optimizers, ``momentum`` for SGD-like ones."""
        groups = getattr(self.engine.optimizer, "param_groups", ())
        return [group["betas"] if "betas" in group else group.get("momentum", 0.0) for group in groups]

    @member
    def step(self, lr_kwargs=None):
        """At an accumulation boundary: clip, update, zero the gradients, step the schedule. Otherwise only counts."""
        engine = self.engine
        assert not engine.inside_no_sync_ctxt, (
            "It is illegal to call Engine.step() inside no_sync context manager: gradients are not reduced there; call "
            "it after the context"
        )
        engine._need_optimizer("engine.step")
        engine._need_states(OffloadStateTypeEnum, "engine.step()")
        stepping = engine.stepping
        boundary = engine.is_gradient_accumulation_boundary() or not engine.managed_gradient_accumulation()
        self.applied = False
        engine._window.begin_step()
        try:
            run_hooks(engine, "before_micro_step", boundary)
            if boundary:
                update = stepping.begin(next_move(engine, lr_kwargs))
                run_hooks(engine, "before_step")
                update()
                self._count(stepping.end())
            engine._window.end_step(boundary)
            run_hooks(engine, "after_micro_step", boundary)
        except BaseException as error:
            engine._window.fail_step()
            run_hooks(engine, "failed", error)
            run_hooks(engine, "failed_step")
            raise
        comms_log.collect()
        if not engine._window.scheduled:
            self.end()

    def end(self):
        """Runs ``after_step`` once for a step at a boundary, when nothing of the step is left to do: a pipeline calls
        it after its schedule."""
        if self.engine._window.close_step():
            run_hooks(self.engine, "after_step")

    def _count(self, applied):
        engine = self.engine
        self.applied = applied
        self.norm = engine.stepping.norm if engine._config.zero_config.compute_grad_norm else None
        for param in engine._unmanaged:
            param.grad = None
        engine.losses = None
        engine.gas_boundary_ctr += 1
        engine.skipped_steps += 0 if applied else 1
        engine.global_steps += 1  # skipped or not: the samples were seen, and loops over global_steps end
        engine._data.last_samples = engine._data.samples_of_step()
        engine.global_samples += engine._data.last_samples
