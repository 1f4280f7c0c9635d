"""Published notes on parameters that are cut over ranks, for universal checkpoints."""

import re

from deepspeed.checkpoint import constants as keys
from deepspeed.module_inject import tp_shard
from deepspeed.utils.param_access import shape_of

_COPIES = "several ranks have copies of the same heads, which the published form cannot say"


def _subparam_shard_widths(subparam_sizes, tp_world_size, name=None):
    """For each sub-parameter the elements of every rank, by the published rules of sizes (``tp_shard``)."""
    return [tp_shard.get_shard_size_list(size, tp_world_size, name) for size in subparam_sizes]


def _build_param_uc_restore_meta(
    *,
    partition_type,
    partition_dim=None,
    logical_shape=None,
    output_shape=None,
    sub_param_shape=None,
    sub_param_sizes=None,
    sub_param_shard_widths=None,
    partition_sizes=None,
    target_partition_shape=None,
    original_shape=None,
    is_bias=False,
    replicated=False,
    unsupported_reason=None,
):
    """The notes on a parameter (its attribute ``ds_autotp_universal_checkpoint_meta``), by which a rank finds its slice
    of the whole one.

    partition_type: "column" or "row". partition_dim: the dimension that is cut. logical_shape and original_shape: of
    the whole parameter. output_shape: of what the layer gives. sub_param_shape: the whole shape with the sizes of
    sub-parameters as a tuple; sub_param_sizes: these sizes; sub_param_shard_widths: for each one the elements of every
    rank. partition_sizes: the elements of every rank, of a parameter without sub-parameters. target_partition_shape: of
    this rank's slice. unsupported_reason: why the published form cannot say which slice it is.
    """
    return {
        "partition_type": partition_type,
        "partition_dim": partition_dim,
        "logical_shape": logical_shape,
        "output_shape": output_shape,
        "sub_param_shape": sub_param_shape,
        "sub_param_sizes": sub_param_sizes,
        "sub_param_shard_widths": sub_param_shard_widths,
        "partition_sizes": partition_sizes,
        "target_partition_shape": target_partition_shape,
        "original_shape": original_shape,
        "is_bias": is_bias,
        "replicated": replicated,
        "unsupported_reason": unsupported_reason,
    }


_CONVERSION = (
    "partition_type", "partition_dim", "original_shape", "is_bias", "replicated", "sub_param_shape", "sub_param_sizes",
    "sub_param_shard_widths", "unsupported_reason",
)  # fmt: skip


def _get_param_uc_conversion_meta(param):
    """Those notes on a parameter by which its slices become a whole one; None without any."""
    meta = getattr(param, keys.DS_AUTOTP_UC_META, None)
    return None if meta is None else {key: meta.get(key) for key in _CONVERSION}


def note(param, cut, partition_type):
    """Writes the notes on a parameter, which is a slice by the ``ParamCut`` ``cut``. ``partition_type``: "column" or
    "row"."""
    shape = tuple(shape_of(param))
    whole = tuple(cut.whole_shape(shape))
    widths = None if cut.cut.copied() else _widths(cut.cut)
    found = dict(unsupported_reason=_COPIES) if widths is None else dict(partition_sizes=widths[0])
    if widths is not None and len(widths) > 1:
        sizes = tuple(sum(width) for width in widths)
        sub_shape = (*whole[: cut.dim], sizes, *whole[cut.dim + 1 :])
        found = dict(sub_param_shape=sub_shape, sub_param_sizes=sizes, sub_param_shard_widths=widths)
    meta = _build_param_uc_restore_meta(
        partition_type=partition_type,
        partition_dim=cut.dim,
        logical_shape=whole,
        original_shape=whole,
        target_partition_shape=shape,
        is_bias=len(shape) == 1,
        **found,
    )
    setattr(param, keys.DS_AUTOTP_UC_META, meta)


def _widths(cut):
    """The elements of every rank of each sub-parameter; a cut without copies deals these in the order of the ranks."""
    ranks = cut.ranks()
    pieces = sorted((start, length, rank) for rank in range(ranks) for start, length in cut.runs(rank))
    widths, last = [], ranks
    for _, length, rank in pieces:
        if rank <= last:
            widths.append([0] * ranks)
        widths[-1][rank], last = length, rank
    return widths or [[0] * ranks]


# ---- of a model -----------------------------------------------------------------------------------------------------
def collect_autotp_universal_checkpoint_info(model):
    """The ``universal_checkpoint_info`` of a model whose layers are cut over ranks; empty for one without such layers.

    Blocks that are alike share patterns. A parameter that no pattern matches is cut along dimension 0.
    """
    return info_of(metas_of(model))


def metas_of(model):
    """``{name of a parameter: how it is cut, or None}``."""
    return {name: _get_param_uc_conversion_meta(param) for name, param in model.named_parameters()}


def info_of(metas):
    """The ``universal_checkpoint_info`` of the parameters that ``metas_of`` tells of."""
    if not any(metas.values()):
        return {}
    listed = {key: [] for key in (
        keys.VOCABULARY_PARAMETER_PATTERNS, keys.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
        keys.TP_REPLICATED_PARAMETER_PATTERNS, keys.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,
        keys.AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS,
    )}  # fmt: skip
    subs = {}
    for pattern, rule in _patterns({name: _rule(meta) for name, meta in metas.items()}):
        if rule in listed:
            listed[rule].append(pattern)
        elif rule is not None:
            subs.setdefault(rule, []).append(pattern)
    return {
        keys.UNIVERSAL_CHECKPOINT_VERSION_KEY: keys.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        **listed,
        keys.PARAMETER_WITH_SUB_PARAMS: [
            {"patterns": patterns, "shape": shape, "partition_dim": dim} for (shape, dim), patterns in subs.items()
        ],
        keys.SUB_PARAM_SHARD_WIDTHS: {
            name: [list(width) for width in meta["sub_param_shard_widths"]]
            for name, meta in metas.items()
            if meta is not None and _rule(meta) in subs
        },
    }


def _rule(meta):
    """The list of patterns that a parameter belongs to, or ``(shape, dimension)`` of an entry of
    ``parameter_with_sub_params``; None for one that is cut along dimension 0."""
    if meta is None or meta["replicated"]:
        return keys.TP_REPLICATED_PARAMETER_PATTERNS
    dim, sizes, widths = meta["partition_dim"], meta["sub_param_sizes"], meta["sub_param_shard_widths"]
    if meta["unsupported_reason"] is not None or sizes is None and dim > 1:
        return keys.AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS
    if sizes is None:
        return keys.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS if dim == 1 else None
    if dim == 0 and len(sizes) == 2 and widths[0] == widths[1]:
        return keys.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0
    return meta["sub_param_shape"], dim


def _patterns(rules):
    """``(pattern, rule)``, where one pattern stands for all numbers of blocks if their rules are equal."""
    alike = {}
    for name, rule in rules.items():
        parts = (r"\d+" if part.isdigit() else re.escape(part) for part in name.split("."))
        alike.setdefault(r"\.".join(parts) + "$", {})[name] = rule
    for pattern, members in alike.items():
        if len(set(members.values())) == 1:
            yield pattern, next(iter(members.values()))
        else:
            yield from ((re.escape(name) + "$", rule) for name, rule in members.items())
