"""One optimizer step: one call of the core, which reduces what is left, measures, clips, updates and casts."""

import math

from deepspeed import _native
from deepspeed.log import log_dist, logger
from deepspeed.zero.errors import UnusedParameterError


def refuse_group(param_group):
    """``add_param_group`` of an optimizer that belongs to an engine, at every ZeRO stage."""
    raise RuntimeError(
        "add_param_group: the optimizer belongs to an engine, which reduces, clips and shards the parameters that it "
        "was given. Pass the group before deepspeed.initialize: in model_parameters, or to add_param_group of the "
        "optimizer that you pass as optimizer="
    )


class Stepping:
    """Runs the step of ``optimizer`` on the gradients in ``core``.

    ``masters`` are the tensors the optimizer updates, one for each piece that this rank owns and in the core's order:
    the parameters themselves in fp32 where nothing is sharded, fp32 views of the core's buffers otherwise. ``scaler``
    is the loss scaler or None. ``check``: gradients that are not finite skip the step. ``clip`` is the maximum
    2-norm, 0 for none.
    """

    def __init__(self, core, optimizer, masters, names, scaler=None, check=False, clip=0.0, rank=0):
        self.core = core
        self.optimizer = optimizer
        self.masters = masters
        self.names = names
        self.scaler = scaler
        self.check = check
        self.clip = clip
        self.rank = rank
        self.fused = None
        self.in_files = None  # StatesInFiles of an optimizer that is not native
        self.need_all = False  # a parameter without a gradient is an error
        self.move = None  # of the learning-rate schedule, which the next step makes
        self._made = False  # whether a step was made since ``begin``
        self.overflow = False
        self.norm = None
        self._warned_not_finite = False
        self._told_of_writes = False
        optimizer.add_param_group = refuse_group
        self._sizes = self._sizes_of_groups()

    def _sizes_of_groups(self):
        return [len(group["params"]) for group in self.optimizer.param_groups]

    def release(self):
        """The optimizer belongs to no engine any more."""
        self.fused = None
        vars(self.optimizer).pop("add_param_group", None)

    @property
    def loss_scale(self):
        return float(self.scaler.loss_scale) if self.scaler is not None else 1.0

    def begin(self, move=None):
        """Returns the call that makes the step, which ``end`` has to follow: of an optimizer of ours its own ``step``,
        so that hooks on it see the step.

        ``move``, of the learning-rate schedule (``engine.scheduling.Move``), is made when it is known that the step is
        not skipped, before anything changes: what it raises leaves all as it was, and the gradients in place.
        """
        self.move, self._made = move, False
        return self.step if self.fused is None else self.optimizer.step

    def end(self):
        """Returns True when the weights were updated, False when the step was skipped."""
        self.move = None
        if not self._made:
            raise RuntimeError(f"{type(self.optimizer).__name__}.step() was replaced by one that makes no update")
        return not self.overflow

    def step(self):
        """One step by one call of the core. ``step`` of an optimizer of ours calls it."""
        if self._sizes_of_groups() != self._sizes:  # somebody wrote to the lists
            refuse_group(None)
        if self.need_all:
            self._refuse_unused()
        move, self.move = self.move, None
        inputs = self._inputs(move)
        try:
            report = self.core.step(inputs)
        except BaseException:
            if move is not None:
                move.undo()
            raise
        if move is not None:
            move.keep()
        self._made = True
        self.norm = report.norm
        self.overflow = report.skipped
        if report.written and not self._told_of_writes:
            self._told_of_writes = True
            names = ", ".join(f"'{name}'" for name in report.written[:3])
            names += f" and {len(report.written) - 3} more" if len(report.written) > 3 else ""
            logger.info(
                f"[Rank {self.rank}] the weights of {names} were changed outside of the optimizer: the fp32 masters "
                "take the new values, which all ranks have to write alike. This is said once."
            )
        if not math.isfinite(report.norm):
            self._explain_overflow(report.nonfinite)
        if self.scaler is not None:
            if report.loss_scale is not None:
                self.scaler.set_state(*report.loss_scale)
            else:
                self.scaler.update_scale(self.overflow)
            if self.overflow:
                log_dist(f"The step is skipped; the loss scale is now {self.scaler.loss_scale:g}.", ranks=[0])

    def expect(self):
        """Before a backward after which a step follows: some strategies of the step begin with it meanwhile."""
        if self.fused is not None and self.core.expects_steps:
            self.core.expect_step(self._inputs(None))

    def _inputs(self, move):
        inputs = _native._C.StepInputs(
            loss_scale=self.loss_scale,
            max_norm=self.clip,
            check=self.check,
            name_nonfinite=self.check or not self._warned_not_finite,
            before_update=None if move is None else move.make,
        )
        rules = getattr(self.scaler, "rules_and_state", lambda: None)()
        if rules is not None:
            inputs.set_scaler(*rules)
        if self.fused is None:
            inputs.set_outside(self.masters, (self.in_files or self.optimizer).step)
        else:
            inputs.groups = self.fused.groups()
        return inputs

    def _refuse_unused(self, most=5):
        unused = self.core.unused_params()
        if unused:
            raise UnusedParameterError(
                f"no rank has a gradient for {len(unused)} parameter(s): {', '.join(unused[:most])}"
                f"{', ...' if len(unused) > most else ''}. Freeze them (requires_grad_(False) before "
                "deepspeed.initialize), or set zero_optimization.ignore_unused_parameters to true"
            )

    def _explain_overflow(self, nonfinite, most=3):
        """Says which gradients were not finite, on the rank that produced them."""
        text = ", ".join(f"parameter '{name}' has {kind}" for name, kind in nonfinite[:most])
        text += f" and {len(nonfinite) - most} more" if len(nonfinite) > most else ""
        if not self.check:
            if not self._warned_not_finite:
                self._warned_not_finite = True
                logger.warning(
                    f"[Rank {self.rank}] the gradient norm is {self.norm}: {text}. fp32 steps are not "
                    "skipped, so the weights are affected. This is said once."
                )
        elif text:
            logger.warning(f"[Rank {self.rank}] gradient overflow: {text}.")
        else:
            log_dist("gradient overflow on another rank, which names the parameter.", ranks=[0])
