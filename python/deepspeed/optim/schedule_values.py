"""Saves and restores the values that a learning-rate schedule changes: its own attributes and parameter groups."""

import collections

import torch

_LONGEST = 10_000  # entries of a list, or elements of a tensor, that may change in one move of a schedule


def rehearse(scheduler, optimizer, function):
    """Calls ``function``, which changes ``scheduler`` or the groups of ``optimizer`` (None: there is none), and
    restores them afterwards: an error of a later call is raised now."""
    state = state_of(scheduler)
    before = values_of(optimizer) if optimizer is not None else None
    try:
        function()
    finally:
        restore_state(state)
        if optimizer is not None:
            restore_values(optimizer, before)


def state_of(scheduler):
    """The attributes of a schedule and of the schedules inside of it, for ``restore_state``: pairs of an object and a
    copy of its contents. Lists, dicts, sets and tensors in them may be changed in place, so these are copied as well.
    """
    saved, seen, found = [], set(), [vars(scheduler)] if hasattr(scheduler, "__dict__") else []
    while found:
        one = found.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, dict) and "params" in one:  # a parameter group
            continue
        if isinstance(one, (dict, list, set, collections.deque)) and len(one) <= _LONGEST:
            saved.append((one, one.copy()))
            found += one.values() if isinstance(one, dict) else one
        elif isinstance(one, tuple):
            found += one
        elif torch.is_tensor(one) and one.numel() <= _LONGEST:
            saved.append((one, one.detach().clone()))
        elif _is_schedule(one):
            found.append(vars(one))
    return saved


def _is_schedule(one):
    inside = hasattr(one, "__dict__") and not isinstance(one, (type, torch.nn.Module)) and not torch.is_tensor(one)
    return inside and callable(getattr(one, "step", None)) and not hasattr(one, "param_groups")


def restore_state(saved):
    for one, copy in saved:
        if torch.is_tensor(one):
            one.detach().copy_(copy)
            continue
        one.clear()
        one.extend(copy) if isinstance(one, (list, collections.deque)) else one.update(copy)


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
