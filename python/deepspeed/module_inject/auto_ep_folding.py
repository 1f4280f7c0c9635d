"""Experts beside tensor parallelism: the ranks of the dense layers are numbered anew for the experts.

The dense layers of a stage are cut over ``tp`` ranks and copied on ``dp`` others; the experts of the same ranks lie on
``ep`` ranks each and are copied on ``edp`` others, with ``tp * dp = ep * edp``. So ``ep`` may be larger than ``dp``.
Source: Liu et al., "MoE Parallel Folding" (2025). Every list of ranks is an answer of the job's ``ProcessGrid``
(csrc/plan/process_grid.h), with the ranks of the experts as a fold.
"""

import dataclasses
from typing import NamedTuple

from deepspeed import comm as dist
from deepspeed.comm import mesh
from deepspeed.utils import groups
from deepspeed.utils.expert_groups import folded_grid
from deepspeed.utils.folded_gradients import (  # noqa: F401 (published here)
    AUTOEP_FOLDING_GRAD_REDUCE_AVERAGE,
    AUTOEP_FOLDING_GRAD_REDUCE_EXPERT_TP_CANCEL,
    AUTOEP_FOLDING_GRAD_REDUCE_SKIP,
    AUTOEP_FOLDING_GRAD_REDUCE_SUM,
    autoep_folding_gradient_reduction_strategy,
    mark_autoep_folding_partial_router_parameter,
    mark_autoep_folding_router_parameter,
    mark_autoep_folding_sp_sharded_layernorm_parameter,
)

_AXES = {"tp": ["tp"], "dense_dp": ["dp"], "ep": ["experts.ep"], "edp": ["experts.edp"]}  # of the grid


@dataclasses.dataclass(frozen=True)
class ParallelFoldingSpec:
    """Sizes: ``world_size`` ranks are ``pp_size`` stages of ``stage_size``, which are ``tp_size * dp_size`` for dense
    layers and ``ep_size * edp_size`` for experts. ``etp_size``: ranks that share one expert, 1. ``mp_mode``: what the
    ranks of ``tp_size`` share, single weights ("tp") or sequences ("sp")."""

    world_size: int
    pp_size: int
    stage_size: int
    tp_size: int
    dp_size: int
    ep_size: int
    etp_size: int
    edp_size: int
    mp_mode: str = "tp"


@dataclasses.dataclass
class FoldingGroupHandles:
    """torch's groups that this rank is in, and their ranks in the job. ``ep_group_name``: under which
    ``deepspeed.utils.groups`` knows the groups of the experts."""

    spec: ParallelFoldingSpec
    tp_group: object
    dense_dp_group: object
    ep_group: object
    edp_group: object
    ep_group_name: str
    tp_ranks: tuple[int, ...]
    dense_dp_ranks: tuple[int, ...]
    ep_ranks: tuple[int, ...]
    edp_ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class FoldingGroupTables:
    """All groups of a job, each of them the ranks in it."""

    tp_groups: tuple[tuple[int, ...], ...]
    dense_dp_groups: tuple[tuple[int, ...], ...]
    ep_groups: tuple[tuple[int, ...], ...]
    edp_groups: tuple[tuple[int, ...], ...]


class LocalFoldingRanks(NamedTuple):
    """The groups of one rank, and as ``tp_rank``, ``dp_rank``, ``ep_rank`` and ``edp_rank`` its places in them."""

    tp_ranks: tuple
    dense_dp_ranks: tuple
    ep_ranks: tuple
    edp_ranks: tuple
    tp_rank: int
    dp_rank: int
    ep_rank: int
    edp_rank: int


def build_folding_spec(*, world_size, pp_size, tp_size, ep_size, etp_size=1, mp_mode="tp"):
    """The ``ParallelFoldingSpec`` of these sizes. ValueError, with the size at fault, where they do not fit."""
    sizes = {"world_size": world_size, "pp_size": pp_size, "tp_size": tp_size, "ep_size": ep_size, "etp_size": etp_size}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} is {size!r}, and it must be a whole number >= 1")
    if mp_mode not in ("tp", "sp"):
        raise ValueError(f"mp_mode is 'tp' or 'sp', not {mp_mode!r}")
    if etp_size != 1:
        raise ValueError(
            f"expert_tensor_parallel_size is {etp_size}: one rank has an expert whole. Leave it at 1, and share the "
            "experts among more ranks by autoep_size, which may be as large as the ranks of a stage"
        )
    if world_size % (pp_size * tp_size):
        raise ValueError(f"pp_size={pp_size} x tp_size={tp_size} does not divide the world_size={world_size} ranks")
    stage = world_size // pp_size
    if stage % ep_size:
        raise ValueError(
            f"ep_size={ep_size} (autoep_size) does not divide the {stage} ranks of a stage, which are "
            f"tp_size={tp_size} x dp_size={stage // tp_size}"
        )
    edp = stage // ep_size
    return ParallelFoldingSpec(world_size, pp_size, stage, tp_size, stage // tp_size, ep_size, etp_size, edp, mp_mode)


def expected_folding_group_tables(spec):
    """The ``FoldingGroupTables`` of a spec. 8 ranks, tp 2, ep 4: tp [0, 1], [2, 3] ..., dense dp [0, 2, 4, 6],
    [1, 3, 5, 7], ep [0, 1, 2, 3], [4, 5, 6, 7], edp [0, 4], [1, 5] ..."""
    grid = folded_grid(spec)
    return FoldingGroupTables(*(tuple(tuple(one) for one in grid.lists(axes)) for axes in _AXES.values()))


def local_folding_ranks(global_rank, spec):
    """The ``LocalFoldingRanks`` of a rank of the job. ValueError for a rank that the job does not have."""
    if not 0 <= global_rank < spec.world_size:
        raise ValueError(f"rank {global_rank} is not one of the {spec.world_size} ranks of the job")
    grid = folded_grid(spec)
    lists = [tuple(grid.list(axes, global_rank)) for axes in _AXES.values()]
    return LocalFoldingRanks(*lists, *(one.index(global_rank) for one in lists))


def assert_group_matches_spec(existing_rank_lists, spec, *, group_kind="ep_edp"):
    """Raises ValueError where a group that exists is none that the spec has.

    Args:
        existing_rank_lists: lists of ranks; for "ep_edp" a pair of them, those of "ep" and of "edp".
        group_kind: "tp", "dense_dp", "ep", "edp" or "ep_edp".
    """
    kinds = ("ep", "edp") if group_kind == "ep_edp" else (group_kind,)
    if not set(kinds) <= set(_AXES):
        raise ValueError(f"group_kind is {group_kind!r}; it is one of ep_edp, {', '.join(_AXES)}")
    tables = expected_folding_group_tables(spec)
    given = existing_rank_lists if group_kind == "ep_edp" else (existing_rank_lists,)
    if len(given) != len(kinds):
        raise ValueError(f"group_kind 'ep_edp' needs a pair, the lists of ep and of edp, not {len(given)} entries")
    for kind, lists in zip(kinds, given):
        wanted = getattr(tables, f"{kind}_groups")
        for ranks in lists:
            if tuple(ranks) not in wanted:
                raise ValueError(
                    f"there is a group of the ranks {list(ranks)}, and folding with tp_size={spec.tp_size} and "
                    f"ep_size={spec.ep_size} needs the {kind} groups {[list(one) for one in wanted]}: make the groups "
                    "with the same sizes everywhere, or leave that to deepspeed.initialize"
                )


def make_folding_groups(spec):
    """The ``FoldingGroupHandles`` of this rank. Every rank of the job calls it; groups that exist are used where they
    have the ranks of the spec, and are a ValueError otherwise."""
    name = f"ep_size_{spec.ep_size}"
    groups._create_expert_and_data_parallel(spec.ep_size, spec.tp_size, spec.pp_size, spec.mp_mode, folding_spec=spec)
    existing = groups._get_expert_parallel_group_ranks(name), groups._get_expert_data_parallel_group_ranks(name)
    assert_group_matches_spec([[one] for one in existing], spec)
    own = local_folding_ranks(dist.get_rank(), spec)
    tp_group, dense_dp_group, ep_group, edp_group = map(mesh.group_over, own[:4])
    return FoldingGroupHandles(spec, tp_group, dense_dp_group, ep_group, edp_group, name, *own[:4])
