"""The layout that checkpoints of ZeRO stages 1 and 2 have, made from the pieces that ranks own."""

import collections

import torch

from deepspeed import _native
from deepspeed import comm as dist
from deepspeed.utils.tensor_fragment import fragment_address
from deepspeed.zero.tensor_of_pieces import TensorOfPieces


def per_element(value):
    """Whether a saved state has a value for each element of a flat buffer, unlike a step count."""
    return hasattr(value, "shape") and len(value.shape) > 0


class FlatLayout:
    """Each group's parameters end to end in the optimizer's order, cut into equal partitions, one for each rank.

    A partition has an even number of elements; what is left behind the last parameter is padding. One collective moves
    each kind of tensor of each group. ``optimizer``: a ``ShardedOptimizer`` below stage 3.
    """

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.group = optimizer.dp_process_group
        self.world = dist.get_world_size(self.group) if self.group is not None else 1
        self.rank = dist.get_rank(self.group) if self.group is not None else 0
        self.sizes, self.owned, self.firsts, first = [], [], [], 0
        for params in optimizer.bit16_groups:
            total = sum(param.numel() for param in params)
            size = 2 * -(-total // (2 * self.world))
            self.sizes.append(size)
            self.owned.append(min(max(total - self.rank * size, 0), size))
            self.firsts.append(first)
            first += len(params)
        numels = [[param.numel() for param in params] for params in optimizer.bit16_groups]
        self.layout = _native._C.SavedLayout.flat(numels, self.sizes, self.world, "the optimizer")
        self.paddings = [size - owned for size, owned in zip(self.sizes, self.owned)]
        self._cuts = [_native._C.GroupCut(optimizer.core, group, size) for group, size in enumerate(self.sizes)]

    def partition(self, group, kind, pieces):
        """This rank's partition, fp32, padding zero, on the CPU. ``pieces``: one tensor or None for each piece that
        this rank owns. Every rank calls it."""
        cut = self._cuts[group]
        given = cut.pack(pieces)
        if self.world == 1 or not self.sizes[group]:  # a group without parameters: nobody has anything to give
            made = cut.unpack(given)
        else:
            taken = given.new_empty(sum(cut.take_numels))
            dist.all_to_all_single(taken, given, cut.take_numels, cut.give_numels, group=self.group)
            made = cut.unpack(taken)
        self._reorder(made, group, kind)
        return made.cpu()

    def in_pieces(self, group, pieces, numel):
        """The first ``numel`` elements of what ``partition`` gives, as a ``TensorOfPieces`` over the memory of the
        pieces; None where they cannot be taken as they are: on several ranks, of another dtype, or in another order."""
        first, params = self.firsts[group], self.optimizer.bit16_groups[group]
        starts, parts, offset = {}, [], 0
        for index, param in enumerate(params, first):
            if not param.is_contiguous() or param.dtype == torch.float64:
                return None
            starts[index] = offset
            offset += param.numel()
        if self.world != 1:
            return None
        for piece, (index, begin, count) in zip(pieces, self.optimizer.core.pieces(), strict=True):
            if index not in starts or piece is None:
                continue
            if piece.dtype != torch.float32 or not piece.is_contiguous() or piece.numel() != count:
                return None
            at = starts[index] + begin
            if at < numel:
                parts.append((at, piece.detach().reshape(-1)[: numel - at]))
        return TensorOfPieces(numel, torch.float32, sorted(parts, key=lambda part: part[0]))

    def _reorder(self, made, group, kind):
        """Files have the order of rows; pieces of parameters with other strides that of memory."""
        for index, param in enumerate(self.optimizer.bit16_groups[group], self.firsts[group]):
            if param.is_contiguous():
                continue
            whole = self.optimizer.full_tensor(index, kind)  # every rank takes part, whoever needs it
            for offset, numel, rank, begin in self.layout.runs(index) if whole is not None else ():
                if rank == self.rank:
                    made[begin : begin + numel] = whole.reshape(-1)[offset : offset + numel]

    def slice_mapping(self, group):
        """Ordered dict: name -> ``fragment_address`` in this rank's partition, of the parameters that have a part."""
        found = collections.OrderedDict()
        for index in range(self.firsts[group], self.firsts[group] + len(self.optimizer.bit16_groups[group])):
            for _, numel, rank, begin in self.layout.runs(index):
                if rank == self.rank:
                    found[self.optimizer._names[index]] = fragment_address(numel=numel, start=begin)
        return found


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
            self.kinds = [list(optimizer.optimizer.slots_of(group)) for group in optimizer.optimizer.param_groups]
            return
        for master, (index, _, _) in zip(stepping.masters, optimizer.core.pieces(), strict=True):
            group = groups_of[index]
            for key, value in optimizer.optimizer.state.get(master, {}).items():
                if not (torch.is_tensor(value) and value.shape == master.shape and per_element(value)):
                    self.scalars[group].setdefault(key, value.cpu() if torch.is_tensor(value) else value)
                elif key not in self.kinds[group]:
                    self.kinds[group].append(key)
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

    def pieces(self, kind):
        """One tensor or None for each piece that this rank owns."""
        stepping = self.optimizer.stepping
        if stepping.fused is not None:
            return self.optimizer.core.slots(self.optimizer.core.slot_names().index(kind))
        state = self.optimizer.optimizer.state
        return [state.get(master, {}).get(kind) for master in stepping.masters]

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
