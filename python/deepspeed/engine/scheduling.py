"""One move of the learning-rate schedule, with the arguments that its ``step`` wants, as part of an engine's step.

The schedule moves before the weights change, so that one that raises leaves everything as it was. The update still has
the rates from before the move. Whether the step is skipped is known later, because the host does not wait for the
device before the update: then the move is undone.
"""

import contextlib
import inspect
import warnings

import torch

from deepspeed import comm as dist
from deepspeed.optim.schedule_values import (
    restore_state,
    restore_values,
    same_values,
    state_of,
    values_of,
    write_values,
)


def next_move(engine, lr_kwargs):
    """The ``Move`` of ``engine.lr_scheduler``, or None without one. TypeError when its ``step`` cannot be called.

    Without ``lr_kwargs``, a schedule that counts samples or tokens is told how many there are. A ``step`` that needs
    one argument gets the loss of this step (the mean over the ranks of ``engine.losses``) if it is called ``metrics``,
    as in ``ReduceLROnPlateau``, and the samples of this step if it is called ``increment``, as in Megatron's
    ``step(increment)``. Nobody knows what another argument means, such as the number of an epoch.
    """
    scheduler = engine.lr_scheduler
    if scheduler is None:
        return None
    kwargs = dict(lr_kwargs or {})
    if getattr(scheduler, "units", ()) and not kwargs:
        return Move(scheduler, engine.basic_optimizer, (engine._tokens.done(),), kwargs)
    return Move(scheduler, engine.basic_optimizer, _missing_argument(engine, scheduler, kwargs), kwargs)


def _missing_argument(engine, scheduler, kwargs):
    """``()``, or a tuple of the one positional argument that ``kwargs`` leave open."""
    try:
        signature = inspect.signature(scheduler.step)
    except (TypeError, ValueError):  # written in C: it will tell by itself
        return ()
    try:
        signature.bind(**kwargs)
        return ()
    except TypeError as error:
        called = f"{type(scheduler).__name__}.step{signature}"
        problem = TypeError(f"engine.step(lr_kwargs={kwargs or None}) does not fit {called}: {error}")
    needed = [
        param.name
        for param in signature.parameters.values()
        if param.default is param.empty and param.kind in (param.POSITIONAL_ONLY, param.POSITIONAL_OR_KEYWORD)
    ]
    if kwargs or len(needed) != 1:
        raise problem
    if needed[0] == "increment":
        return (engine._data.samples_of_step(),)
    if needed[0] != "metrics":
        raise TypeError(
            f"{called} needs `{needed[0]}`, and an engine can give a schedule only `increment`, the samples of the "
            f"step, or `metrics`, the loss: pass engine.step(lr_kwargs={{'{needed[0]}': value}}), or do not pass this "
            "schedule to deepspeed.initialize and call its step() in the script"
        )
    loss = mean_loss(engine)
    if loss is None:
        raise TypeError(
            f"{called} needs `metrics`, and this step has no loss of engine.backward(loss) to take for it: pass "
            "engine.step(lr_kwargs={'metrics': value})"
        )
    return (loss,)


def mean_loss(engine):
    """The loss of this step, over the data-parallel ranks that have one; None when no rank has. Every rank calls it."""
    if hasattr(engine, "train_batch"):
        return engine._losses.total().item()
    sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
    if engine.losses is not None:
        sums += torch.stack([engine.losses.to(sums), torch.ones_like(sums[0])])
    if engine.parallel.dp_world_size > 1:
        dist.all_reduce(sums, group=engine.parallel.dp_group)
    total, count = sums.tolist()
    return total / count if count else None


class Move:
    """One call of ``scheduler.step``: ``make`` it before the update, then ``keep`` its rates or ``undo`` it."""

    def __init__(self, scheduler, optimizer, args, kwargs):
        self.scheduler, self.optimizer, self.args, self.kwargs = scheduler, optimizer, args, kwargs
        self._state = self._before = self._after = None

    def make(self):
        """Moves the schedule; the parameter groups have their old values again until ``keep``."""
        self._state = state_of(self.scheduler)
        self._before = values_of(self.optimizer)
        try:
            # At its first move torch's schedule warns if the optimizer has not stepped; that update comes next.
            with _no_warning_of_order() if getattr(self.scheduler, "_step_count", 0) == 1 else contextlib.nullcontext():
                self.scheduler.step(*self.args, **self.kwargs)
        except BaseException:
            self.undo()
            raise
        self._after = values_of(self.optimizer)
        restore_values(self.optimizer, self._before)

    def keep(self):
        """Puts in what the schedule has written. The rest is the update's: optimizers keep counters in their groups."""
        if self._after is None:
            return
        for group, before, after in zip(self.optimizer.param_groups, self._before, self._after):
            for key in before.keys() - after.keys():
                group.pop(key, None)
            write_values(group, {key: saved for key, saved in after.items() if not same_values(before.get(key), saved)})

    def undo(self):
        """As if the schedule had not moved, as far as its state (``schedule_values.state_of``) and the parameter groups
        go."""
        if self._state is None:
            return
        restore_state(self._state)
        if self._after is None:  # it raised; else the groups have their old values since `make`
            restore_values(self.optimizer, self._before)


@contextlib.contextmanager
def _no_warning_of_order():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before")
        yield
