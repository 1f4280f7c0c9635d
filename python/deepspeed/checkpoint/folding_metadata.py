"""What an optimizer file says about the grid of a run whose experts lie on other ranks than its dense layers: its
``folding`` key, compared before such a file is loaded."""

from deepspeed.checkpoint import constants as keys

SHARED_EXPERTS_ON_TP_RANKS = "tensor_parallel"
DISPATCH_ALL_TO_ALL = "all_to_all"


def make_folding_metadata(
    *,
    tp_size,
    tp_rank,
    ep_size,
    ep_rank,
    zero_partition_group,
    zero_partition_rank,
    zero_partition_count,
    family,
    param_families=None,
):
    """The dict that is saved. ``zero_partition_*``: the ranks that share the file's states, and which one wrote it;
    ``family``: which kind of parameters it has; ``param_families``: dict name of a parameter -> its kind."""
    return {
        keys.FOLDING_TP_SIZE: tp_size,
        keys.FOLDING_TP_RANK: tp_rank,
        keys.FOLDING_EP_SIZE: ep_size,
        keys.FOLDING_EP_RANK: ep_rank,
        keys.FOLDING_ETP_SIZE: 1,
        keys.FOLDING_ETP_RANK: 0,
        keys.FOLDING_ZERO_PARTITION_GROUP: list(zero_partition_group)
        if isinstance(zero_partition_group, (list, tuple))
        else zero_partition_group,
        keys.FOLDING_ZERO_PARTITION_RANK: zero_partition_rank,
        keys.FOLDING_ZERO_PARTITION_COUNT: zero_partition_count,
        keys.FOLDING_FAMILY: family,
        keys.FOLDING_PARAM_FAMILIES: dict(param_families or {}),
        keys.FOLDING_SHARED_EXPERT_PLACEMENT: SHARED_EXPERTS_ON_TP_RANKS,
        keys.FOLDING_DISPATCH_STRATEGY: DISPATCH_ALL_TO_ALL,
    }


def validate_folding_metadata(
    metadata,
    *,
    tp_size,
    ep_size,
    etp_size=1,
    tp_rank=None,
    ep_rank=None,
    etp_rank=None,
    zero_partition_group=None,
    zero_partition_rank=None,
    zero_partition_count=None,
    family=None,
    param_families=None,
    shared_expert_placement=None,
    dispatch_strategy=None,
):
    """Raises ValueError that names every key in which ``metadata`` differs from the arguments; None is not compared."""
    if not isinstance(metadata, dict):
        raise ValueError(f"the optimizer file has no '{keys.FOLDING_METADATA_KEY}' dict: its grid of ranks is not known")
    wanted = {
        keys.FOLDING_TP_SIZE: tp_size,
        keys.FOLDING_EP_SIZE: ep_size,
        keys.FOLDING_ETP_SIZE: etp_size,
        keys.FOLDING_TP_RANK: tp_rank,
        keys.FOLDING_EP_RANK: ep_rank,
        keys.FOLDING_ETP_RANK: etp_rank,
        keys.FOLDING_ZERO_PARTITION_GROUP: zero_partition_group,
        keys.FOLDING_ZERO_PARTITION_RANK: zero_partition_rank,
        keys.FOLDING_ZERO_PARTITION_COUNT: zero_partition_count,
        keys.FOLDING_FAMILY: family,
        keys.FOLDING_PARAM_FAMILIES: param_families,
        keys.FOLDING_SHARED_EXPERT_PLACEMENT: shared_expert_placement,
        keys.FOLDING_DISPATCH_STRATEGY: dispatch_strategy,
    }
    problems = []
    for key, value in wanted.items():
        if value is None:
            continue
        if key not in metadata:
            problems.append(f"{key} is missing, this run has {value!r}")
        elif _plain(metadata[key]) != _plain(value):
            problems.append(f"{key} is {metadata[key]!r}, this run has {value!r}")
    if problems:
        raise ValueError(f"the optimizer file was saved by another grid of ranks: {'; '.join(problems)}")


def _plain(value):
    return list(value) if isinstance(value, tuple) else value
