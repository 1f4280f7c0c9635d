"""The published notes on parameters that are cut over ranks, and the rules that a model makes of them."""

import random

import pytest
import torch
from torch import nn

from deepspeed._native import _C
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.layouts.saved_universal import ParallelRules, merge_slices
from deepspeed.checkpoint.universal_checkpoint import _resolve_autotp_partition
from deepspeed.module_inject import layers, universal_info
from deepspeed.utils.param_cut import ParamCut
from deepspeed.utils.tensor_slices import cut_of_table, table_of


def random_cut(pick, copies=False):
    """A cut of one to three sub-parameters, uneven and with empty slices at times."""
    ranks, sizes, runs = pick.randint(1, 4), [pick.randint(1, 9) for _ in range(pick.randint(1, 3))], []
    for size in sizes:
        ends = [0, *sorted(pick.randint(0, size) for _ in range(ranks - 1)), size]
        shared = copies and pick.random() < 0.5
        runs.append([(0, size)] * ranks if shared else list(zip(ends, ends[1:])))
    return _C.TensorCut(sizes, runs)


def slices_of(whole, dim, cut):
    """The parameter of each rank, with its notes."""
    found = []
    for rank in range(cut.ranks()):
        made = ParamCut(dim, cut, None, rank)
        param = nn.Parameter(made.own(whole))
        universal_info.note(param, made, "column")
        found.append(param)
    return found


@pytest.mark.parametrize("seed", range(100))
def test_tables_give_the_cut_back(seed):
    cut = random_cut(random.Random(seed), copies=True)
    again = cut_of_table(table_of(cut))
    assert again.size() == cut.size() and table_of(again) == table_of(cut)
    assert [again.owned(rank) for rank in range(cut.ranks())] == [cut.owned(rank) for rank in range(cut.ranks())]


@pytest.mark.parametrize("seed", range(100))
def test_notes_find_the_slice_and_rules_the_whole(seed):
    pick = random.Random(seed)
    cut, dim = random_cut(pick), pick.randint(0, 1)
    shape = [3, 3]
    shape[dim] = cut.size()
    whole = torch.randn(shape)
    params = slices_of(whole, dim, cut)
    for rank, param in enumerate(params):
        found = _resolve_autotp_partition(param, {keys.PARAM: whole}, whole, rank, cut.ranks())
        assert torch.equal(found, param.reshape(-1))
    model = nn.Module()
    model.weight = params[0]
    info = layers.collect_autotp_universal_checkpoint_info(model)
    joined, _ = merge_slices("weight", [param.data for param in params], ParallelRules(info))
    assert torch.equal(joined, whole)


def test_copies_are_said_to_be_unsupported():
    cut = _C.TensorCut([4, 2], [[(0, 2), (2, 4)], [(0, 2), (0, 2)]])
    param = slices_of(torch.randn(6, 2), 0, cut)[1]
    meta = layers._get_param_uc_conversion_meta(param)
    assert "copies" in meta["unsupported_reason"] and meta["original_shape"] == (6, 2)
    with pytest.raises(ValueError, match="copies of the same heads"):
        _resolve_autotp_partition(param, {}, torch.zeros(6, 2), 1, 2)


class _Block(nn.Module):
    def __init__(self, fused):
        super().__init__()
        whole = torch.randn(12, 4)
        sizes = [6, 3, 3] if fused else [6, 6]
        cut = _C.TensorCut(sizes, [_C.unit_runs(size, 3) for size in sizes])
        self.fused, self.row = (
            slices_of(whole, 0, cut)[0],
            slices_of(whole.t(), 1, _C.TensorCut([12], [[(0, 5), (5, 9), (9, 12)]]))[0],
        )
        self.column = slices_of(torch.randn(6), 0, _C.TensorCut([6], [_C.unit_runs(6, 3)]))[0]
        self.norm = nn.Parameter(torch.ones(4))


def test_blocks_that_are_alike_share_patterns():
    info = layers.collect_autotp_universal_checkpoint_info(nn.Sequential(_Block(True), _Block(True)))
    assert info[keys.UNIVERSAL_CHECKPOINT_VERSION_KEY] == keys.UNIVERSAL_CHECKPOINT_VERSION_VALUE
    assert info[keys.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS] == [r"\d+\.row$"]
    assert info[keys.TP_REPLICATED_PARAMETER_PATTERNS] == [r"\d+\.norm$"]
    assert info[keys.PARAMETER_WITH_SUB_PARAMS] == [
        {"patterns": [r"\d+\.fused$"], "shape": ((6, 3, 3), 4), "partition_dim": 0}
    ]
    widths = [[2, 2, 2], [1, 1, 1], [1, 1, 1]]
    assert info[keys.SUB_PARAM_SHARD_WIDTHS] == {"0.fused": widths, "1.fused": widths}
    assert not info[keys.VOCABULARY_PARAMETER_PATTERNS] and not info[keys.AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS]


def test_blocks_that_differ_have_patterns_of_their_own():
    info = layers.collect_autotp_universal_checkpoint_info(nn.Sequential(_Block(True), _Block(False)))
    assert info[keys.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0] == [r"1\.fused$"]
    assert info[keys.PARAMETER_WITH_SUB_PARAMS][0]["patterns"] == [r"0\.fused$"]


def test_a_model_that_is_whole_says_nothing():
    assert layers.collect_autotp_universal_checkpoint_info(nn.Linear(3, 3)) == {}
    assert layers._get_param_uc_conversion_meta(nn.Parameter(torch.zeros(1))) is None


def test_widths_follow_the_published_rules():
    assert layers._subparam_shard_widths((7, 4), 2) == [[4, 3], [2, 2]]
    meta = layers._build_param_uc_restore_meta(partition_type="row", partition_dim=1, partition_sizes=[4, 3])
    assert meta["partition_type"] == "row" and meta["partition_sizes"] == [4, 3] and meta["replicated"] is False
