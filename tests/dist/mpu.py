"""The object with which Megatron tells an engine its groups."""

import torch.distributed as dist


class Mpu:
    """``data``: the ranks that train the same parameters, a group; ``model``: those that share a model, or None."""

    def __init__(self, data, model=None):
        for kind, group in (("data", data), ("model", model)):
            if group is not None:
                self._answer(f"get_{kind}_parallel_", group)

    def _answer(self, prefix, group):
        setattr(self, prefix + "group", lambda: group)
        setattr(self, prefix + "world_size", lambda: dist.get_world_size(group))
        setattr(self, prefix + "rank", lambda: dist.get_rank(group))


def two_by_two(rank):
    """The mpu of rank ``rank`` of four: two data-parallel ranks times two that share a model; all of them call it."""
    data, model, pairs = ((0, 2), (1, 3)), ((0, 1), (2, 3)), {}
    for ranks in (*data, *model):
        pairs[ranks] = dist.new_group(list(ranks))
    return Mpu(pairs[data[rank % 2]], pairs[model[rank // 2]])
