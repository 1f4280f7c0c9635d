"""One optimizer step: one call of the core, which reduces what is left, measures, clips, updates and casts."""

import functools
import itertools
import math

import torch

from deepspeed import _native
from deepspeed.log import log_dist, logger
from deepspeed.ops.by_name import is_native
from deepspeed.zero.errors import UnusedParameterError
from deepspeed.zero.states.states_in_files import is_each


def refuse_group(param_group):
    """``add_param_group`` of an optimizer that belongs to an engine, at every ZeRO stage."""
    raise RuntimeError(
        "add_param_group: the optimizer belongs to an engine, which reduces, clips and shards the parameters that it "
        "was given. Pass the group before deepspeed.initialize: in model_parameters, or to add_param_group of the "
        "optimizer that you pass as optimizer="
    )


def _first(texts, most=3):
    """The first ones, and how many follow."""
    texts = list(texts)
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


class Stepping:
    """Runs the step of ``optimizer`` on the gradients in ``core``.

    ``masters`` are the tensors the optimizer updates, one for each piece that this rank owns and in the core's order:
    the parameters themselves in fp32 where nothing is sharded, fp32 views of the core's buffers otherwise. ``scaler``
    is the loss scaler or None. ``check``: gradients that are not finite skip the step. ``clip`` is the maximum
    2-norm, 0 for none.

    ``fused``: the core makes the update of an optimizer of ours (``ops.native_optimizer``) in one pass over its flat
    buffers. The optimizer object stays what users know: ``param_groups`` that schedulers write to, ``state`` with the
    states of each parameter, ``state_dict`` and ``load_state_dict``. Its attribute ``fused_state`` is this object.
    """

    def __init__(self, core, optimizer, masters, names, scaler=None, check=False, clip=0.0, rank=0):
        self.core, self.optimizer, self.masters, self.names = core, optimizer, masters, names
        self.scaler, self.check, self.clip, self.rank = scaler, check, clip, rank
        self.exchanges = None  # of an optimizer of ours
        self.in_files = None  # StatesInFiles of an optimizer that is not native
        self.need_all = False  # a parameter without a gradient is an error
        # Called with the norm when it is known and nothing has changed; with False, too, where no update follows.
        self.inspect = None
        self.move = None  # of the learning-rate schedule, which the next step makes
        self._made = False  # whether a step was made since ``begin``
        self.overflow = False
        self.norm = None
        self.bytes = {}  # that this rank held after the last step, by kind, for the log of steps
        self._warned_not_finite = False
        self._told_of_writes = False
        optimizer.add_param_group = refuse_group
        self._sizes = self._sizes_of_groups()
        self.fused = is_native(optimizer) and all(master.dtype == torch.float32 for master in masters)
        if self.fused:
            self._install()

    def _install(self):
        optimizer = self.optimizer
        optimizer.check_engine()
        self.core.set_rules([optimizer.rule_of(group) for group in optimizer.param_groups])
        if optimizer.stochastic_rounding:
            logger.warning(
                f"{type(optimizer).__name__}: stochastic_rounding has no effect in this engine, which keeps fp32 "
                "masters: nothing is lost there, and the model's 16-bit weights are the masters rounded to nearest."
            )
        given = {master: state for master in self.masters if (state := optimizer.state.get(master))}
        optimizer.state.update(self._views())
        optimizer.fused_state = self
        self.exchanges = _native._C.SignExchanges(self.core)
        self._tell()
        if given:  # of steps that it has made, or of load_state_dict
            optimizer.state.update(given)
            self.adopt()

    def _sizes_of_groups(self):
        return [len(group["params"]) for group in self.optimizer.param_groups]

    def release(self):
        """The optimizer belongs to no engine any more."""
        if self.fused:
            self.fused, self.optimizer.fused_state = False, None
        vars(self.optimizer).pop("add_param_group", None)

    @property
    def loss_scale(self):
        return float(self.scaler.loss_scale) if self.scaler is not None else 1.0

    def names_of(self, groups):
        """The names of the parameters in the form of ``groups``, lists of all parameters."""
        names = iter(self.names)
        return [list(itertools.islice(names, len(group))) for group in groups]

    def begin(self, move=None):
        """Returns the call that makes the step, which ``end`` has to follow: of an optimizer of ours its own ``step``,
        so that hooks on it see the step.

        ``move``, of the learning-rate schedule (``engine.scheduling.Move``), is made before anything changes: if it
        raises, nothing has changed, gradients included. If the step is skipped, it is undone.
        """
        self.move, self._made = move, False
        return self.optimizer.step if self.fused else self.step

    def end(self):
        """Returns True when the weights were updated, False when the step was skipped."""
        self.move = None
        if not self._made:
            raise RuntimeError(f"{type(self.optimizer).__name__}.step() was replaced by one that makes no update")
        return not self.overflow

    def step(self):
        """One step by one call of the core. ``step`` of an optimizer of ours calls it."""
        if self._sizes_of_groups() != self._sizes:  # a client wrote to the lists
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
            move.undo() if report.skipped else move.keep()
        self._made = True
        if self.inspect is not None and report.skipped:
            self.inspect(report.norm, False)
        self.norm, self.bytes = report.norm, report.bytes
        self.overflow = report.skipped
        if report.written and not self._told_of_writes:
            self._told_of_writes = True
            logger.info(
                f"[Rank {self.rank}] the weights of {_first(map(repr, report.written))} were changed outside of the "
                "optimizer: the fp32 masters take the new values, which all ranks have to write alike. This is said "
                "once."
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
        if self.fused and (self.core.expects_steps or self.exchanges.active):
            self.core.expect_step(self._inputs(None))

    def _tell(self):
        """Hyperparameters decide whether ranks add up their gradients before the first step."""
        if self.exchanges.active:
            self.core.expect_step(self._inputs(None))

    def forget_exchanges(self):
        """States were loaded: the errors of exchanges start from zero."""
        self.core.restore_strategy(self.core.strategy_counters())
        self._tell()

    def _inputs(self, move):
        inputs = _native._C.StepInputs(
            loss_scale=self.loss_scale,
            max_norm=self.clip,
            check=self.check,
            name_nonfinite=self.check or not self._warned_not_finite,
            before_update=None if move is self.inspect is None else functools.partial(self._before_update, move),
            norm_first=self.inspect is not None,
        )
        rules = getattr(self.scaler, "rules_and_state", lambda: None)()
        if rules is not None:
            inputs.set_scaler(*rules)
        if self.fused:
            groups, optimizer = self.optimizer.param_groups, self.optimizer
            inputs.groups = [(optimizer.rule_of(group), optimizer.rule_args(group)) for group in groups]
        else:
            inputs.set_outside(self.masters, (self.in_files or self.optimizer).step)
        return inputs

    def _before_update(self, move):
        if self.inspect is not None:
            self.inspect(self.core.step_norm())
        if move is not None:
            move.make()

    def _refuse_unused(self, most=5):
        unused = self.core.unused_params()
        if unused:
            raise UnusedParameterError(
                f"no rank has a gradient for {len(unused)} parameter(s): {', '.join(unused[:most])}"
                f"{', ...' if len(unused) > most else ''}. Freeze them (requires_grad_(False) before "
                "deepspeed.initialize), or set zero_optimization.ignore_unused_parameters to true"
            )

    def _explain_overflow(self, nonfinite):
        """Says which gradients were not finite, on the rank that produced them."""
        text = _first(f"parameter '{name}' has {kind}" for name, kind in nonfinite)
        if not self.overflow:
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

    # ---- what is kept of each piece ----------------------------------------------------------------------------------
    def kept(self):
        """dict: kind -> the arguments by which the core knows what it keeps of each piece: "fp32" (masters), "grad",
        and the states of an optimizer of ours."""
        slots = self.core.slot_names() if self.fused else ()
        states = {name: ("slot", number) for number, name in enumerate(slots)}
        return {"fp32": ("master", 0), "grad": ("grad", 0), **states}

    def own(self, kind, numbers):
        """The tensors of a kind of this rank's pieces with these ``numbers``, None where there is none: views, of what
        lies in files copies."""
        kept = self.kept().get(kind)
        if kept is not None:
            return [self.core.piece_tensor(*kept, number) for number in numbers]
        masters, states = [self.masters[number] for number in numbers], {} if self.fused else self.optimizer.state
        found = [(states.get(master, {}).get(kind), master) for master in masters]
        return [value if is_each(value, master) else None for value, master in found]

    def keep(self, kind, number, values):
        """``values`` of ``own``, which have been written: a state that lies in a file was read as a copy."""
        if values is not None and self.in_files is not None:
            self.optimizer.state[self.masters[number]][kind] = values

    def _views(self):
        apart = set(self.core.strategy_states())  # they are the engine's, not the optimizer's
        names, steps = [name for name in self.core.slot_names() if name not in apart], self.core.steps()
        slots = [self.core.slots(number) for number in range(len(names))]
        for number, (param, (index, _, _)) in enumerate(zip(self.masters, self.core.pieces())):
            own = {name: slot[number] for name, slot in zip(names, slots) if slot[number] is not None}
            yield param, {"step": steps[index], **own}

    def read(self, number, state):
        """``state``, of parameter number ``number``, with copies of what lies in files and has no memory."""
        kept = self.kept()
        return {
            name: self.own(name, [number])[0] if name in kept and value.is_meta else value
            for name, value in state.items()
        }

    def adopt(self):
        """Takes what ``load_state_dict`` put into ``optimizer.state`` into the flat buffers."""
        kept = self.kept()
        for number, (param, views) in enumerate(self._views()):
            loaded = self.optimizer.state.get(param, {})
            for name, view in views.items():
                if name == "step":
                    view.fill_(float(loaded.get(name, 0)))
                    continue
                if name in loaded and loaded[name].numel() != view.numel():
                    raise ValueError(
                        f"optimizer state '{name}' has shape {tuple(loaded[name].shape)} where the parameter has "
                        f"{tuple(view.shape)}: the checkpoint is of another model or of other parameter groups"
                    )
                with self.core.piece(*kept[name], number, "write") as own:
                    if name in loaded:
                        own.copy_(loaded[name].reshape(view.shape))
                    else:
                        own.zero_()
            self.optimizer.state[param] = views
