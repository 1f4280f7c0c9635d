"""The step of an engine: at an accumulation boundary the optimizer's, else a count."""

from deepspeed.comm import comms_log
from deepspeed.config.sections import OffloadStateTypeEnum
from deepspeed.engine.members import member
from deepspeed.engine.scheduling import next_move
from deepspeed.log import warning_once
from deepspeed.zero.audit import Audit


class Steps:
    """A part of the engine."""

    def __init__(self, engine):
        self.engine = engine
        self.audit = None
        self.applied = False
        self.norm = None
        self._hooks_wait = False  # a step at a boundary is done, and its hooks have not run
        self.micro_steps = 0  # calls of step since the last one at a boundary

    def start_audit(self):
        """Once the engine is assembled."""
        steps = self.engine._config.zero_config.audit_steps
        if steps and self.engine._trains:
            self.audit = Audit(self.engine, steps)

    def forget(self):
        """The gradients of this step are forgotten."""
        if self.audit is not None:
            self.audit.forget()

    @member
    def get_global_grad_norm(self):
        """2-norm of the gradients of the last step, before clipping; None before the first step."""
        return self.norm

    @member
    def was_step_applied(self):
        """True when the last step() changed weights."""
        return self.applied

    @member
    def loss_scale(self):
        """The loss scale in use now; 1.0 without fp16."""
        return getattr(self.engine.optimizer, "loss_scale", 1.0)

    @member
    def get_pld_theta(self):
        """The share of layers that progressive layer dropping keeps now; None while it is off."""
        return None

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
        self.update(lr_kwargs)
        self.run_hooks()

    def update(self, lr_kwargs=None):
        """The step without the hooks of its end; whoever calls it calls ``run_hooks`` when nothing of the step is left
        to do: a pipeline does so after its schedule."""
        engine = self.engine
        assert not engine.inside_no_sync_ctxt, (
            "It is illegal to call Engine.step() inside no_sync context manager: gradients are not reduced there; call "
            "it after the context"
        )
        engine._need_optimizer("engine.step")
        engine._need_states(OffloadStateTypeEnum, "engine.step()")
        self._refuse_unseen_backward()
        boundary = engine.is_gradient_accumulation_boundary() or not engine.managed_gradient_accumulation()
        if boundary:
            engine._user_weights.bring_home()
        self._join_backward(boundary)
        self.applied = False
        try:
            engine.progress.start_step()
            if boundary:
                self._take(lr_kwargs)
                engine._experts.end_step()
        except BaseException:
            engine.progress.stop_step()
            raise
        engine.micro_steps += 1
        self.micro_steps = 0 if boundary else self.micro_steps + 1
        engine._backward.start_micro_step()
        engine._accumulation.user_scaled = False
        engine.progress.end_step(boundary)
        comms_log.collect()
        if boundary:
            engine._data.start_window()
        self._hooks_wait = boundary

    def run_hooks(self):
        """The end of a step at a boundary, once for each. Raises an error of a save in the background, and SystemExit
        behind SIGTERM with ``elasticity.save_on_signal``."""
        if not self._hooks_wait:
            return
        self._hooks_wait = False
        engine = self.engine
        if (behind := getattr(engine.checkpoint_engine, "behind", None)) is not None:
            behind.step_done()
        engine._memory_copies.step_done()
        engine._announced_end.step_done()

    def _refuse_unseen_backward(self):
        """A backward that the user ran is noticed at the outputs of forward. Where those hold no tensor that can be
        found, gradients come in without the factor that belongs to them."""
        backward, factor = self.engine._backward, self.engine._accumulation.user_plan()[1]
        if backward.noticed is False and not backward.seen and factor != 1.0 and self.engine.core.has_grads():
            raise RuntimeError(
                "the model returned an object in which no tensor that needs gradients was found, so a plain "
                f"loss.backward() could not be noticed, and its gradients lack the factor {factor:g} (loss scale over "
                "accumulation steps). Call engine.backward(loss) instead, or return tensors, tuples, lists, dicts or "
                "objects that hold them as attributes"
            )

    def _join_backward(self, boundary):
        """A rank without a backward in this micro-step still takes part in the reduction of the others' gradients."""
        if self.engine._backward.seen:
            return
        core = self.engine.core
        has_gradient = core.has_grads()
        core.join_backward(boundary or self.engine._stage_policy.reduces_each_micro_step)
        if not has_gradient:
            warning_once(
                "engine.step() without a gradient: there was no backward on this rank since the last step. The step "
                "counts, and changes the weights only by the gradients of other ranks. Was engine.backward(loss) "
                "forgotten? This is said once.",
                key="a step without a gradient",
            )

    def _take(self, lr_kwargs):
        engine = self.engine
        move = next_move(engine, lr_kwargs)
        if self.audit is not None:
            engine.core.finish_backward()
            self.audit.before_step()
        self.applied = engine.stepping.step(move)
        if self.audit is not None:
            self.audit.after_step(self.applied)
            self.audit = None if self.audit.over else self.audit
        self.norm = engine.stepping.norm
        for param in engine._unmanaged:
            param.grad = None
        engine.losses = None
        engine.gas_boundary_ctr += 1
        engine.skipped_steps += 0 if self.applied else 1
        engine.global_steps += 1  # skipped or not: the samples were seen, and loops over global_steps end
        engine.global_samples += engine._data.samples_of_step()
        engine._backward.micro_batches = 0
