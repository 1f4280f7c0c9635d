"""How ranks are laid out in groups: lists of ranks only, no process groups. Every rank is in one list of each kind.

Ranks of one pipeline stage are consecutive, and within a stage those of one tensor-parallel group.
"""


def _must_divide(size, whole, what, of):
    if size < 1 or whole % size != 0:
        fits = ", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0)
        raise ValueError(f"{what} {size} does not divide the {whole} {of}: use one of {fits}")


def consecutive(ranks, size, what):
    """``ranks`` in runs of ``size``."""
    _must_divide(size, len(ranks), what, "ranks")
    return [ranks[begin : begin + size] for begin in range(0, len(ranks), size)]


def strided(ranks, size, what):
    """The holders of the same place in runs of ``size``: as many groups as a run has members."""
    _must_divide(size, len(ranks), what, "ranks")
    return [ranks[place::size] for place in range(size)]


def data_parallel_lists(world_size, tensor_size=1, pipeline_size=1):
    """The ranks that hold the same part of the model, one list for each part, stage by stage."""
    _must_divide(pipeline_size, world_size, "pipeline_parallel_size", "ranks")
    stages = consecutive(list(range(world_size)), world_size // pipeline_size, "pipeline stage")
    return [group for stage in stages for group in strided(stage, tensor_size, "tensor_parallel_size")]


def expert_lists(world_size, tensor_size, expert_size, pipeline_size=1, data_before_expert=False):
    """``(expert-parallel lists, expert-data-parallel lists)``.

    The members of an expert-parallel list hold different experts, those of an expert-data-parallel list the same ones.
    Both cut the data-parallel lists: an expert-parallel list is a run of ``expert_size`` ranks, or, with
    ``data_before_expert``, takes one of each run of holders of the same experts.
    """
    experts, copies = [], []
    for ranks in data_parallel_lists(world_size, tensor_size, pipeline_size):
        _must_divide(expert_size, len(ranks), "expert_parallel_size", "data-parallel ranks")
        if data_before_expert:
            count = len(ranks) // expert_size
            experts += strided(ranks, count, "expert_data_parallel_size")
            copies += consecutive(ranks, count, "expert_data_parallel_size")
        else:
            experts += consecutive(ranks, expert_size, "expert_parallel_size")
            copies += strided(ranks, expert_size, "expert_parallel_size")
    return experts, copies
