"""Saves and restores the values that a learning-rate schedule changes: its own attributes and parameter groups."""

import torch


def rehearse(scheduler, optimizer, function):
    """Calls ``function``, which changes ``scheduler`` or the groups of ``optimizer`` (None: there is none), and
    restores them afterwards: an error of a later call is raised now."""
    state = [(one, dict(vars(one))) for one in with_inner(scheduler)]
    before = values_of(optimizer) if optimizer is not None else None
    try:
        function()
    finally:
        for one, attributes in state:
            vars(one).clear()
            vars(one).update(attributes)
        if optimizer is not None:
            restore_values(optimizer, before)


def with_inner(scheduler):
    """The schedule, and those inside of one that is put together from others (``SequentialLR``,
    ``ChainedScheduler``)."""
    found = [scheduler] if hasattr(scheduler, "__dict__") else []
    for inner in getattr(scheduler, "_schedulers", ()):
        found += with_inner(inner)
    return found


def values_of(optimizer):
    """The values of each parameter group other than its parameters. A tensor is copied as well, because it may be
    changed in place."""
    return [
        {
            key: (value, value.detach().clone()) if torch.is_tensor(value) else (value, None)
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def restore_values(optimizer, values):
    for group, saved in zip(optimizer.param_groups, values):
        for key in [key for key in group if key != "params" and key not in saved]:
            del group[key]
        write_values(group, saved)


def write_values(group, saved):
    for key, (value, copy) in saved.items():
        if copy is not None:
            value.detach().copy_(copy)
        group[key] = value


def same_values(before, after):
    """Whether nothing was written between two entries of ``values_of``; ``before`` is None where there was none."""
    if before is None or before[0] is not after[0]:
        return False
    return after[1] is None or torch.equal(before[1], after[1])
