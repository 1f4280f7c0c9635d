"""Values that an inner optimizer keeps of each group, in the form of ZeRO checkpoints: cut states, and others."""

import torch

from deepspeed import comm as dist
from deepspeed.zero.states.named_states import groups_of_params
from deepspeed.zero.states.states_in_files import split_states


def per_element(value):
    """Whether a saved state has a value for each element of a flat buffer, unlike a step count."""
    return hasattr(value, "shape") and len(value.shape) > 0


# Keys of a saved group or sub-group for values of its parameters, in their order, where these differ.
PARAM_STEPS = "param_steps"
PARAM_SCALARS = "param_scalars"


class InnerStates:
    """The states that the inner optimizer keeps of each group: names of states that are cut, and values that are not.

    An optimizer of torch makes states in its first step and has them only where it has parameters: ranks that have none
    learn here what the others save. Every rank makes one of these.
    """

    def __init__(self, optimizer):
        self.optimizer = optimizer
        stepping = optimizer.stepping
        groups_of = groups_of_params(optimizer.bit16_groups)
        self.scalars = {}  # of each parameter, by its number
        if stepping.fused:
            own, kept = optimizer.optimizer, optimizer.core.strategy_states()
            self.kinds = [[*own.slots_of(group), *kept] for group in own.param_groups]
            return
        cut = [{} for _ in optimizer.bit16_groups]  # of each group: name -> whether it is cut, wherever it is
        for master, (index, _, _) in zip(stepping.masters, optimizer.core.pieces(), strict=True):
            group, states = groups_of[index], optimizer.optimizer.state.get(master, {})
            names, others = split_states(states, master)
            for key in states:
                cut[group][key] = key in names and cut[group].get(key, True)
            if master.numel() == 1:  # only pieces of more elements tell whether such a state is one value
                others = dict(states)
            for key, value in others.items():
                kept = value.cpu() if torch.is_tensor(value) else value
                self.scalars.setdefault(index, {}).setdefault(key, kept)
        self._share(cut, optimizer.dp_process_group)
        self.kinds = [sorted(key for key, whole in of_group.items() if whole) for of_group in cut]
        for index, kept in self.scalars.items():
            for kind in self.kinds[groups_of[index]]:
                kept.pop(kind, None)

    def _share(self, cut, process_group):
        """Every rank gets the values of all parameters, and in ``cut`` what all ranks together say."""
        if process_group is None:
            return
        found = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(found, (cut, self.scalars), group=process_group)
        for of_rank, scalars in found:
            for agreed, named in zip(cut, of_rank):
                agreed.update({key: whole and agreed.get(key, True) for key, whole in named.items()})
            self.scalars = {**scalars, **self.scalars}

    def of_group(self, group, params, steps):
        """The values that are not cut, of the parameters with the numbers ``params``, which have seen ``steps``
        updates: ``step`` is the most of these. ``param_steps`` and ``param_scalars`` say the values of each parameter
        where they differ."""
        kept = [self.scalars.get(index, {}) for index in params]
        found, differ = {}, {}
        for key in dict.fromkeys(key for scalars in kept for key in scalars if key != "step"):
            values = [scalars.get(key) for scalars in kept]
            known = [value for value in values if value is not None]
            if known and not per_element(known[0]) and all(_equal(known[0], value) for value in known):
                found[key] = known[0]
            else:
                differ[key] = values
        if differ:
            found[PARAM_SCALARS] = differ
        step = next((scalars["step"] for scalars in kept if "step" in scalars), None)
        if step is not None or self.optimizer.stepping.fused:
            most = max(steps, default=0)
            found["step"] = torch.full_like(step, most) if torch.is_tensor(step) else most
            if len(set(steps)) > 1:
                found[PARAM_STEPS] = list(steps)
        return found


def _equal(one, other):
    if torch.is_tensor(one) and torch.is_tensor(other):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and one == other
