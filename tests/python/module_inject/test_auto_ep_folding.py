"""``deepspeed.module_inject.auto_ep_folding``: sizes, ranks and gradients where tensor-parallel ranks share experts."""

import dataclasses
import itertools
import random

import pytest
import torch

from deepspeed.module_inject import auto_ep_folding as folding
from deepspeed.module_inject.auto_ep_folding import build_folding_spec
from refusals import refused


def spec_of(world=8, pp=1, tp=2, ep=4, **more):
    return build_folding_spec(world_size=world, pp_size=pp, tp_size=tp, ep_size=ep, **more)


def test_sizes():
    spec = spec_of()
    assert dataclasses.asdict(spec) == {
        "world_size": 8, "pp_size": 1, "stage_size": 8, "tp_size": 2, "dp_size": 4, "ep_size": 4, "etp_size": 1,
        "edp_size": 2, "mp_mode": "tp",
    }  # fmt: skip
    assert spec_of(16, 2, mp_mode="sp").stage_size == 8
    refused(dataclasses.FrozenInstanceError, "tp_size", setattr, spec, "tp_size", 4)


@pytest.mark.parametrize(
    "sizes, words",
    [
        ({"tp": 3}, "pp_size=1 x tp_size=3 does not divide the world_size=8"),
        ({"ep": 3}, r"ep_size=3 \(autoep_size\) does not divide the 8 ranks of a stage.*tp_size=2 x dp_size=4"),
        ({"ep": 0}, "ep_size is 0"),
        ({"tp": True}, "tp_size is True"),
        ({"world": 8.0}, "world_size is 8.0"),
        ({"etp_size": 2}, "expert_tensor_parallel_size is 2.*Leave it at 1"),
        ({"mp_mode": "dp"}, "mp_mode is 'tp' or 'sp', not 'dp'"),
    ],
)
def test_sizes_that_do_not_fit(sizes, words):
    refused(ValueError, words, spec_of, **sizes)


def test_groups_of_eight_ranks():
    tables = folding.expected_folding_group_tables(spec_of())
    assert tables == folding.FoldingGroupTables(
        tp_groups=((0, 1), (2, 3), (4, 5), (6, 7)),
        dense_dp_groups=((0, 2, 4, 6), (1, 3, 5, 7)),
        ep_groups=((0, 1, 2, 3), (4, 5, 6, 7)),
        edp_groups=((0, 4), (1, 5), (2, 6), (3, 7)),
    )
    staged = folding.expected_folding_group_tables(spec_of(8, 2, 2, 4))
    assert staged.ep_groups == ((0, 1, 2, 3), (4, 5, 6, 7)) and staged.dense_dp_groups == (
        (0, 2), (1, 3), (4, 6), (5, 7),
    )  # fmt: skip
    assert folding.local_folding_ranks(5, spec_of()) == ((4, 5), (1, 3, 5, 7), (4, 5, 6, 7), (1, 5), 1, 2, 1, 1)
    refused(ValueError, "rank 8 is not one of the 8", folding.local_folding_ranks, 8, spec_of())


def test_random_jobs():
    draw = random.Random(0)
    for _ in range(40):
        pp, tp, ep, edp = (draw.choice([1, 2, 3, 4]) for _ in range(4))
        stage = tp * ep * edp
        spec = spec_of(pp * stage, pp, tp, ep)
        tables = folding.expected_folding_group_tables(spec)
        sizes = spec.tp_size, spec.dp_size, spec.ep_size, spec.edp_size
        for lists, size in zip(dataclasses.astuple(tables), sizes):
            assert sorted(itertools.chain(*lists)) == list(range(spec.world_size))
            assert all(len(ranks) == size and max(ranks) // stage == min(ranks) // stage for ranks in lists)
        rank = draw.randrange(spec.world_size)
        local = folding.local_folding_ranks(rank, spec)
        inner = rank % stage
        assert (local.tp_rank, local.dp_rank) == (inner % tp, inner // tp)
        assert (local.ep_rank, local.edp_rank) == (inner % ep, inner // ep)
        assert [local.ep_ranks] == [ranks for ranks in tables.ep_groups if rank in ranks]


def test_groups_that_exist():
    spec = spec_of()
    tables = folding.expected_folding_group_tables(spec)
    folding.assert_group_matches_spec((tables.ep_groups, tables.edp_groups), spec)
    folding.assert_group_matches_spec([[2, 3]], spec, group_kind="tp")
    words = r"a group of the ranks \[0, 2, 4, 6\].*ep_size=4 needs the ep groups \[\[0, 1, 2, 3\]"
    refused(ValueError, words, folding.assert_group_matches_spec, ([[0, 2, 4, 6]], tables.edp_groups), spec)
    refused(ValueError, "edp groups", folding.assert_group_matches_spec, (tables.ep_groups, [[0, 1]]), spec)
    refused(ValueError, "group_kind is 'pp'", folding.assert_group_matches_spec, [], spec, group_kind="pp")
    refused(ValueError, "needs a pair", folding.assert_group_matches_spec, [], spec)


def test_gradients():
    strategy, spec = folding.autoep_folding_gradient_reduction_strategy, spec_of()

    def param(mark=None, **attributes):
        made = torch.nn.Parameter(torch.zeros(2))
        vars(made).update(attributes)
        if mark is not None:
            mark(made)
        return made

    router, partial = folding.mark_autoep_folding_router_parameter, folding.mark_autoep_folding_partial_router_parameter
    norm = folding.mark_autoep_folding_sp_sharded_layernorm_parameter
    assert strategy(spec, param()) == folding.AUTOEP_FOLDING_GRAD_REDUCE_SKIP
    assert strategy(spec, param(tensor_model_parallel=True)) == folding.AUTOEP_FOLDING_GRAD_REDUCE_SKIP
    assert strategy(spec, param(allreduce=False)) == folding.AUTOEP_FOLDING_GRAD_REDUCE_EXPERT_TP_CANCEL
    assert strategy(spec, param(router)) == folding.AUTOEP_FOLDING_GRAD_REDUCE_AVERAGE
    assert strategy(spec, param(partial)) == strategy(spec, param(norm)) == folding.AUTOEP_FOLDING_GRAD_REDUCE_SUM
    for none in (None, spec_of(tp=1)):
        assert {strategy(none, one) for one in (param(), param(partial), param(allreduce=False))} == {"skip"}
    refused(ValueError, "'gate' is marked.*of an expert", strategy, spec, param(router, allreduce=False),
            param_name="gate")  # fmt: skip
    refused(ValueError, "a slice of its own", strategy, spec, param(norm, tensor_model_parallel=True))
