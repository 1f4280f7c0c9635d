"""The learning-rate schedules of the configuration: WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest.

The formulas are C++ (csrc/optim/lr_schedule.h); the classes here apply them to an optimizer's parameter groups.
``step()`` is called once per optimizer step, by the engine when it owns the schedule. The iteration is -1 before the
first step; the groups always hold the rate of the current iteration, from construction and after load_state_dict on.

Rates may be one number for all parameter groups or a list with one per group.

``unit``: what a schedule counts instead of optimizer steps, "samples" or "tokens". All parameters that are called steps
are numbers of these then, and iteration i is that in which i + 1 of them are done; ``step`` has to be told, which an
engine does. ``warmup_unit``: what the warm-up alone counts. A warm-up of another unit ends when its own count says so;
what follows begins at the iteration of that moment.
"""

import collections.abc

import torch

from deepspeed import _native
from deepspeed.log import logger
from deepspeed.optim.lr_parameters import WARMUP_LOG_RATE, count, curve, number, unit_of

_formulas = _native._C.lr_schedules
LARGEST_MOMENTUM = 0.999  # to which OneCycle raises it after the cycle


def get_torch_optimizer(optimizer):
    """The object whose ``param_groups`` a schedule writes to: a torch optimizer, the one inside a wrapper that has it
    as ``.optimizer``, or any object with ``param_groups``. TypeError for anything else."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        return inner
    if isinstance(getattr(optimizer, "param_groups", None), (list, tuple)):
        return optimizer
    raise TypeError(
        f"a learning-rate schedule needs a torch.optim.Optimizer, or an object with param_groups, "
        f"but got {type(optimizer).__name__}."
    )


class _Schedule:
    """The base of the five schedules. A subclass checks its parameters, then calls ``_start``."""

    units = frozenset()  # those whose counts ``step`` wants
    unit = "steps"

    def __init__(self, optimizer, unit="steps"):
        self.unit, self.units = unit_of("unit", unit), frozenset([unit]) - {"steps"}
        self.optimizer = get_torch_optimizer(optimizer)
        self._groups = len(self.optimizer.param_groups)

    def _per_group(self, name, value):
        if not isinstance(value, (list, tuple)):
            return [number(name, value)] * self._groups
        if len(value) != self._groups:
            raise ValueError(
                f"scheduler parameter {name} has {len(value)} values, but the optimizer has {self._groups} parameter "
                f"groups. Give one number for all groups, or one per group."
            )
        return [number(name, one) for one in value]

    def _own_rates(self, instead=""):
        """The rate that each parameter group has itself. ``instead``: the parameter that could say it, too."""
        without = [number for number, group in enumerate(self.optimizer.param_groups) if "lr" not in group]
        if without:
            advice = f", or the schedule the parameter {instead}" if instead else ""
            raise ValueError(
                f"{type(self).__name__} starts from the rates of the parameter groups, and group {without[0]} of "
                f"{type(self.optimizer).__name__} has no lr. Give the group one{advice}."
            )
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _start(self, formula, last_batch_iteration):
        self._formula = formula
        self._move_to(count("last_batch_iteration", last_batch_iteration))

    def _move_to(self, iteration):
        groups = self.optimizer.param_groups
        if len(groups) != self._groups:
            raise ValueError(
                f"the optimizer has {len(groups)} parameter groups now, but had {self._groups} when its "
                f"{type(self).__name__} was made. Make the schedule after the last add_param_group."
            )
        self.last_batch_iteration = iteration
        self._last_lr = self.get_lr()
        for group, rate in zip(groups, self._last_lr):
            set_rate(group, rate)

    def step(self, batch_iteration=None):
        """Goes to the next iteration, or to the given one: a number, or ``{unit: number that is done}`` of all
        ``units``."""
        if isinstance(batch_iteration, collections.abc.Mapping):
            self._move_by(batch_iteration)
        elif self.units and batch_iteration is None:
            raise ValueError(
                f"a {type(self).__name__} that counts {' and '.join(sorted(self.units))} does not know what the next "
                "iteration is: leave its steps to the engine, or give step() the iteration"
            )
        else:
            self._move_to(self.last_batch_iteration + 1 if batch_iteration is None else batch_iteration)

    def _move_by(self, done):
        self._move_to(self._iteration(self.unit, done, self.last_batch_iteration))

    @staticmethod
    def _iteration(unit, done, last):
        return last + 1 if unit == "steps" else done[unit] - 1

    def get_lr(self):
        """Rates of the current iteration, one per parameter group."""
        return self._formula.lr(self.last_batch_iteration)

    def get_last_lr(self):
        """Rates that were written to the parameter groups last, one per group."""
        return list(self._last_lr)

    def state_dict(self):
        return {"last_batch_iteration": self.last_batch_iteration, **({"unit": self.unit} if self.units else {})}

    def load_state_dict(self, sd):
        """Continues at the saved iteration and writes its rates to the parameter groups."""
        if sd.get("unit", "steps") != self.unit:
            raise ValueError(
                f"the saved {type(self).__name__} has counted {sd.get('unit', 'steps')}, and this one counts "
                f"{self.unit}: set scheduler.params.unit as it was, or load without the schedule "
                "(load_lr_scheduler_states=False)"
            )
        self._move_to(sd["last_batch_iteration"])


def set_rate(group, rate):
    """Writes the learning rate of a parameter group."""
    if isinstance(group.get("lr"), torch.Tensor):  # capturable optimizers keep the rate on the device
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


class _WithWarmup(_Schedule):
    """``_formula_of(num_steps)`` makes the formula with a warm-up of ``num_steps`` steps."""

    # A warm-up with a unit of its own keeps its iteration here, and the iteration of the main unit at which it ended.
    warmup_iteration, warmup_end = -1, None

    def __init__(self, optimizer, unit, warmup_unit):
        super().__init__(optimizer, unit)
        self.warmup_unit = unit if warmup_unit is None else unit_of("warmup_unit", warmup_unit)
        self.units |= frozenset([self.warmup_unit]) - {"steps"}

    def _begin(self, last_batch_iteration):
        self._start(self._formula_of(self.warmup_num_steps), last_batch_iteration)

    def _move_by(self, done):
        iteration = self._iteration(self.unit, done, self.last_batch_iteration)
        if self.warmup_unit != self.unit:
            self._warm_up_to(self._iteration(self.warmup_unit, done, self.warmup_iteration), iteration)
        self._move_to(iteration)

    def _warm_up_to(self, own, iteration):
        self.warmup_iteration = own
        if self.warmup_end is None and own >= max(2, self.warmup_num_steps):
            self.warmup_end, self._formula = iteration, self._formula_of(iteration)

    @property
    def _asked(self):
        """The iteration that the formula is asked for."""
        warms_up = self.warmup_unit != self.unit and self.warmup_end is None
        return self.warmup_iteration if warms_up else self.last_batch_iteration

    def get_lr(self):
        """Rates of the current iteration, one per parameter group."""
        return self._formula.lr(self._asked)

    def state_dict(self):
        own = {"warmup_iteration": self.warmup_iteration, "warmup_end": self.warmup_end}
        return {**super().state_dict(), **(own if self.warmup_unit != self.unit else {})}

    def load_state_dict(self, sd):
        """Continues at the saved iteration and writes its rates to the parameter groups."""
        if self.warmup_unit != self.unit:
            self.warmup_iteration, self.warmup_end = sd.get("warmup_iteration", -1), sd.get("warmup_end")
            self._formula = self._formula_of(self.warmup_num_steps if self.warmup_end is None else self.warmup_end)
        super().load_state_dict(sd)

    def _read_warmup(self, num_steps, kind):
        if num_steps is None:
            raise ValueError("scheduler parameter warmup_num_steps is None: give the number of steps of the warm-up.")
        self.warmup_num_steps, self.warmup_type = count("warmup_num_steps", num_steps), curve(kind)

    def _read_end(self, total_num_steps):
        self.total_num_steps = count("total_num_steps", total_num_steps)
        if self.warmup_unit == self.unit and self.total_num_steps < self.warmup_num_steps:
            logger.warning(
                "%s: total_num_steps = %d is less than warmup_num_steps = %d, so training ends before the rate has "
                "risen.",
                type(self).__name__,
                self.total_num_steps,
                self.warmup_num_steps,
            )

    def step(self, last_batch_iteration=None):
        """Goes to the next iteration, or to the given one: a number, or ``{unit: number that is done}`` of all
        ``units``."""
        told = last_batch_iteration
        if self.warmup_unit != self.unit and told is not None and not isinstance(told, collections.abc.Mapping):
            raise ValueError(
                f"{type(self).__name__}.step({told!r}): its warm-up counts {self.warmup_unit}, the rest {self.unit}: "
                "give step() a dict with the number that is done of each"
            )
        super().step(told)


class LRRangeTest(_Schedule):
    """Raises the rate from ``lr_range_test_min_lr`` without end, to find the largest usable one (Smith 2017, 3.3):
    ``min_lr * (1 + step_rate * t)`` with ``t = (iteration + 1) / step_size``, rounded down with ``staircase``.

    lr_range_test_step_size: iterations in which t grows by one, >= 1.
    lr_range_test_step_rate: growth per unit of t, relative to the smallest rate.
    """

    def __init__(
        self,
        optimizer,
        lr_range_test_min_lr=1e-3,
        lr_range_test_step_size=2000,
        lr_range_test_step_rate=1.0,
        lr_range_test_staircase=False,
        last_batch_iteration=-1,
        unit="steps",
    ):
        super().__init__(optimizer, unit)
        self.min_lr = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = count("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = bool(lr_range_test_staircase)
        self._start(
            _formulas.LrRangeTest(self.min_lr, self.step_size, self.step_rate, self.staircase), last_batch_iteration
        )


class OneCycle(_Schedule):
    """One cycle of the rate, up then down, and of the momentum, down then up; then decay (Smith 2018).

    In the cycle the rate goes from ``cycle_min_lr`` to ``cycle_max_lr`` in ``cycle_first_step_size`` iterations and
    back in ``cycle_second_step_size`` (default: the same), in a line, or with a stair count in that many equal
    jumps; with a second size of 0 it falls to the smallest rate where it would have reached the largest. After it the
    rate is ``min_lr / (1 + decay_lr_rate * u)`` and the momentum
    ``max_mom * (1 + decay_mom_rate * u)``, where u counts units of ``decay_step_size`` iterations; with
    ``decay_step_size`` 0 both stay. The momentum is ``betas[0]`` of groups that have ``betas``, else ``momentum``;
    ``cycle_momentum`` is switched off, with a line in the log, where a group has neither.

    Rates and momenta are a number for all groups or a list with one for each; the groups have the rates from
    construction on. Until the first step they have the smallest momentum, ``cycle_min_mom``, as published. The decay
    ends at a momentum of 0.999, or at ``cycle_max_mom`` where that is larger, because 1 makes no average. ``min_lrs``,
    ``max_lrs``, ``min_moms`` and ``max_moms`` (as ``get_mom`` gives them) are those of each group, ``total_size`` the
    iterations of the cycle and ``step_ratio`` the share of the first half: 1.0 without a second one.
    """

    def __init__(
        self,
        optimizer,
        cycle_min_lr,
        cycle_max_lr,
        decay_lr_rate=0.0,
        cycle_first_step_size=2000,
        cycle_second_step_size=None,
        cycle_first_stair_count=0,
        cycle_second_stair_count=None,
        decay_step_size=0,
        cycle_momentum=True,
        cycle_min_mom=0.8,
        cycle_max_mom=0.9,
        decay_mom_rate=0.0,
        last_batch_iteration=-1,
        unit="steps",
    ):
        super().__init__(optimizer, unit)
        first = count("cycle_first_step_size", cycle_first_step_size)
        second = first if cycle_second_step_size is None else count("cycle_second_step_size", cycle_second_step_size)
        self.first_stair_count = count("cycle_first_stair_count", cycle_first_stair_count)
        self.second_stair_count = (
            self.first_stair_count
            if cycle_second_stair_count is None
            else count("cycle_second_stair_count", cycle_second_stair_count)
        )
        self.decay_step_size = count("decay_step_size", decay_step_size)
        shape = _formulas.CycleShape(
            first, second, self.first_stair_count, self.second_stair_count, self.decay_step_size
        )
        self.min_lrs = self._per_group("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self._per_group("cycle_max_lr", cycle_max_lr)
        self.decay_lr_rate = number("decay_lr_rate", decay_lr_rate)
        rates = _formulas.OneCycleLr(self.min_lrs, self.max_lrs, self.decay_lr_rate, shape)
        # The constructors of the formulas have checked the sizes: the cycle has a step at least.
        self.total_size = float(first + second)
        self.step_ratio = first / self.total_size
        min_mom = self._per_group("cycle_min_mom", cycle_min_mom)
        max_mom = self._per_group("cycle_max_mom", cycle_max_mom)
        self.decay_mom_rate = number("decay_mom_rate", decay_mom_rate)
        momenta = _formulas.OneCycleMomentum(min_mom, max_mom, self.decay_mom_rate, shape)
        self.cycle_momentum = bool(cycle_momentum) and self._has_momenta()
        self.min_moms, self.max_moms = self._with_betas(min_mom), self._with_betas(max_mom)
        self._momenta = momenta if self.cycle_momentum else None
        self._caps = [max(largest, LARGEST_MOMENTUM) for largest in max_mom]
        self._start(rates, last_batch_iteration)
        if self._momenta is not None and last_batch_iteration == -1:
            self._set_momenta(self.min_moms)

    def _has_momenta(self):
        """Whether all groups have a momentum to cycle; a group without one gets the ``betas`` of the optimizer's
        defaults, where there are any."""
        without = [group for group in self.optimizer.param_groups if "betas" not in group and "momentum" not in group]
        betas = getattr(self.optimizer, "defaults", {}).get("betas")
        if without and betas is None:
            logger.warning(
                "OneCycle: cycle_momentum is off, because %s has a parameter group with neither betas nor momentum.",
                type(self.optimizer).__name__,
            )
            return False
        for group in without:
            group["betas"] = tuple(betas)
        return True

    def _with_betas(self, momenta):
        """A value for each group: the whole ``betas`` of groups that have them, else the momentum."""
        groups = zip(self.optimizer.param_groups, momenta)
        return [(one, *group["betas"][1:]) if "betas" in group else one for group, one in groups]

    def get_mom(self):
        """Momenta of the current iteration, one per group: the whole ``betas`` tuple for groups that have one, else a
        number. None when momentum is not cycled."""
        if self._momenta is None:
            return None
        momenta = self._momenta.momentum(self.last_batch_iteration)
        return self._with_betas([min(one, cap) for one, cap in zip(momenta, self._caps)])

    def _move_to(self, iteration):
        super()._move_to(iteration)
        if self._momenta is not None:
            self._set_momenta(self.get_mom())

    def _set_momenta(self, momenta):
        for group, value in zip(self.optimizer.param_groups, momenta):
            group["betas" if "betas" in group else "momentum"] = value


class WarmupLR(_WithWarmup):
    """Raises the rate from ``warmup_min_lr`` to ``warmup_max_lr`` over ``warmup_num_steps`` iterations, then keeps it.

    warmup_max_lr: default None: each group's own rate.
    warmup_type:   "log": log(iteration + 1) / log(warmup_num_steps) of the way; "linear": iteration / warmup_num_steps.
                   Any other text warns and rises as "log" does.
    """

    def __init__(
        self,
        optimizer,
        warmup_min_lr=0.0,
        warmup_max_lr=None,
        warmup_num_steps=1000,
        warmup_type=WARMUP_LOG_RATE,
        last_batch_iteration=-1,
        unit="steps",
        warmup_unit=None,
    ):
        super().__init__(optimizer, unit, warmup_unit)
        self._read_rates(warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)
        self._begin(last_batch_iteration)

    def _formula_of(self, num_steps):
        return _formulas.WarmupLr(self.min_lrs, self.max_lrs, num_steps, self.warmup_type)

    def _read_rates(self, min_lr, max_lr, num_steps, kind):
        if max_lr is None:
            max_lr = self._own_rates("warmup_max_lr")
        self.min_lrs = self._per_group("warmup_min_lr", min_lr)
        self.max_lrs = self._per_group("warmup_max_lr", max_lr)
        self._read_warmup(num_steps, kind)


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then a straight line from ``warmup_max_lr`` at iteration ``warmup_num_steps`` to ``warmup_min_lr`` at
    iteration ``total_num_steps``, and constant from there on."""

    def __init__(
        self,
        optimizer,
        total_num_steps,
        warmup_min_lr=0.0,
        warmup_max_lr=0.001,
        warmup_num_steps=1000,
        warmup_type=WARMUP_LOG_RATE,
        last_batch_iteration=-1,
        unit="steps",
        warmup_unit=None,
    ):
        _WithWarmup.__init__(self, optimizer, unit, warmup_unit)
        self._read_rates(warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)
        self._read_end(total_num_steps)
        self._begin(last_batch_iteration)

    def _formula_of(self, num_steps):
        return _formulas.WarmupDecayLr(self.min_lrs, self.max_lrs, num_steps, self.warmup_type, self.total_num_steps)


class WarmupCosineLR(_WithWarmup):
    """A factor on each group's own rate: from ``warmup_min_ratio`` to 1 over ``warmup_num_steps``, then half a cosine
    down to ``cos_min_ratio`` at the last of ``total_num_steps`` iterations, and constant from there on (Loshchilov and
    Hutter 2017, without restarts)."""

    def __init__(
        self,
        optimizer,
        total_num_steps,
        warmup_min_ratio=0.0,
        warmup_num_steps=1000,
        cos_min_ratio=0.0001,
        warmup_type=WARMUP_LOG_RATE,
        last_batch_iteration=-1,
        unit="steps",
        warmup_unit=None,
    ):
        super().__init__(optimizer, unit, warmup_unit)
        self.org_lrs = self._own_rates()
        self._read_warmup(warmup_num_steps, warmup_type)
        self._read_end(total_num_steps)
        self._ratios = number("warmup_min_ratio", warmup_min_ratio), number("cos_min_ratio", cos_min_ratio)
        self._begin(last_batch_iteration)

    def _formula_of(self, num_steps):
        low, last = self._ratios
        return _formulas.WarmupCosineLr(self.org_lrs, low, num_steps, last, self.warmup_type, self.total_num_steps)

    def get_lr_ratio(self):
        """The factor of the current iteration."""
        return self._formula.ratio(self._asked)
