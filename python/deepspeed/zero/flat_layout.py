"""The layout that checkpoints of ZeRO stages 1 and 2 have, made from the pieces that ranks own."""

import collections

import torch

from deepspeed import _native
from deepspeed import comm as dist
from deepspeed.utils.tensor_fragment import fragment_address
from deepspeed.zero.states_in_files import split_states
from deepspeed.zero.tensor_of_pieces import TensorOfPieces


def per_element(value):
    """Whether a saved state has a value for each element of a flat buffer, unlike a step count."""
    return hasattr(value, "shape") and len(value.shape) > 0


class FlatLayout:
    """Each group's parameters end to end in the optimizer's order, cut into equal partitions, one for each rank: see
    csrc/zero/group_cut.h. ``optimizer``: a ``ShardedOptimizer`` below stage 3."""

    def __init__(self, optimizer):
        self._names = optimizer._names
        self._cuts = [_native._C.GroupCut(optimizer.core, group) for group in range(len(optimizer.bit16_groups))]
        self.sizes = [cut.size for cut in self._cuts]
        self.owned = [cut.owned for cut in self._cuts]
        self.firsts = [cut.first for cut in self._cuts]
        self.paddings = [size - owned for size, owned in zip(self.sizes, self.owned)]

    def partition(self, group, pieces):
        """This rank's partition, fp32, padding zero, on the CPU. ``pieces``: one tensor or None for each piece that
        this rank owns. Every rank calls it."""
        return self._cuts[group].partition(pieces)

    def in_pieces(self, group, pieces, numel):
        """The first ``numel`` elements of what ``partition`` gives, as a ``TensorOfPieces`` over the memory of the
        pieces; None where they cannot be taken as they are: on several ranks, of another dtype, or in another order."""
        parts = self._cuts[group].in_pieces(pieces, numel)
        return None if parts is None else TensorOfPieces(numel, torch.float32, parts)

    def source(self, group, core, kept, numel):
        """The same of what rests in files, read when it is written down, on any number of ranks; ``kept``: kind and
        slot. None for what does not. Every rank calls it."""
        found = self._cuts[group].source(core, *kept, numel)
        dtype = torch.float64 if found is not None and found.bytes > 4 * numel else torch.float32
        return None if found is None else TensorOfPieces.of_source(numel, dtype, found)

    def slice_mapping(self, group):
        """Ordered dict: name -> ``fragment_address`` in this rank's partition, of the parameters that have a part."""
        return collections.OrderedDict(
            (self._names[index], fragment_address(numel=numel, start=start))
            for index, start, numel in self._cuts[group].slices()
        )


class InnerStates:
    """What the inner optimizer keeps of each group: names of states that are cut, and values that are not.

    An optimizer of torch makes states in its first step and has them only where it has parameters: ranks that have none
    learn here what the others save. Every rank makes one of these.
    """

    def __init__(self, optimizer):
        self.optimizer = optimizer
        stepping = optimizer.stepping
        groups_of = [index for index, group in enumerate(optimizer.bit16_groups) for _ in group]
        self.kinds = [[] for _ in optimizer.bit16_groups]
        self.scalars = [{} for _ in optimizer.bit16_groups]
        if stepping.fused is not None:
            own, kept = optimizer.optimizer, optimizer.core.strategy_states()
            self.kinds = [[*own.slots_of(group), *kept] for group in own.param_groups]
            return
        for master, (index, _, _) in zip(stepping.masters, optimizer.core.pieces(), strict=True):
            group = groups_of[index]
            names, others = split_states(optimizer.optimizer.state.get(master, {}), master)
            for key, value in others.items():
                self.scalars[group].setdefault(key, value.cpu() if torch.is_tensor(value) else value)
            self.kinds[group] += [key for key in names if key not in self.kinds[group]]
        if optimizer.dp_process_group is not None:
            self._agree(optimizer.dp_process_group)

    def _agree(self, process_group):
        found = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(found, (self.kinds, self.scalars), group=process_group)
        for group in range(len(self.kinds)):
            self.kinds[group] = sorted({kind for kinds, _ in found for kind in kinds[group]})
            self.scalars[group] = {}
            for _, scalars in found:
                for key, value in scalars[group].items():
                    self.scalars[group].setdefault(key, value)

    def of_group(self, group, steps):
        """The values that are not cut; ``step`` is the most that a parameter of the group has seen, and ``param_steps``
        says the others' where they differ. ``steps``: of the group's parameters."""
        found = dict(self.scalars[group])
        most = max(steps, default=0)
        if "step" in found or self.optimizer.stepping.fused is not None:
            found["step"] = torch.full_like(found["step"], most) if torch.is_tensor(found.get("step")) else most
            if len(set(steps)) > 1:
                found["param_steps"] = list(steps)
        return found
