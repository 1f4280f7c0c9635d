"""Parameters that load themselves from the folders of a universal checkpoint, and slices by the notes on them."""

import os

import pytest
import torch

from deepspeed.checkpoint import SubparamShape, enable_universal_checkpoint
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.layouts.saved_state import Latest
from deepspeed.checkpoint.universal_checkpoint import (
    _get_param_uc_restore_meta,
    _narrow_sub_params,
    _resolve_autotp_partition,
)
from deepspeed.utils import link_hp_params
from refusals import refused


def write(folder, name, step=None, **states):
    """``states``: name of a state -> dict of its file, or a bare tensor."""
    path = os.path.join(str(folder), name)
    os.makedirs(path)
    for state, value in states.items():
        torch.save(value, os.path.join(path, f"{state}.pt"))
    if step is not None:
        torch.save(step, os.path.join(path, "step.pt"))
    return path


def linked(params, rank, count):
    """Each of ``count`` ranks has its equal part of all elements, end to end, in one flat fp32 tensor."""
    total = sum(p.numel() for p in params)
    size = -(-total // count)
    flat = torch.zeros(min(size, total - rank * size))
    link_hp_params(params, flat, {}, {}, False, 0, rank * size, flat.numel(), None)
    enable_universal_checkpoint(params)
    return flat


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_rank_takes_its_part(count, tmp_path):
    wholes = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    for name, value in wholes.items():
        write(tmp_path, name, step=4, fp32={"param": value, "cat_dim": 0}, exp_avg={"param": value * 2})
    masters, moments = [], []
    for rank in range(count):
        params = [torch.nn.Parameter(torch.zeros_like(value).bfloat16()) for value in wholes.values()]
        masters.append(linked(params, rank, count))
        for name, param in zip(wholes, params):
            assert param.load_hp_checkpoint_state(str(tmp_path / name), tp_rank=0, tp_world_size=1) == 4
            if param._hp_mapping is not None:
                moments.append(param._hp_mapping.get_optim_state_fragment("exp_avg"))
                assert param._hp_mapping.get_optim_state_keys() == ["exp_avg"]
    everything = torch.cat([value.reshape(-1) for value in wholes.values()])
    assert torch.equal(torch.cat(masters), everything) and torch.equal(torch.cat(moments), everything * 2)


def test_states_that_are_there_are_filled_in_place(tmp_path):
    path = write(tmp_path, "w", fp32=torch.ones(4), exp_avg={"param": torch.full((4,), 2.0)})
    param = torch.nn.Parameter(torch.zeros(4))
    linked([param], 0, 1)
    held = torch.zeros(4)
    param._hp_mapping.optim_fragment = {"exp_avg": held}
    assert param.load_hp_checkpoint_state(path, 0, 1) is None  # no step was saved
    assert held.tolist() == [2] * 4 and param._hp_mapping.hp_fragment.tolist() == [1] * 4


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_tensor_parallel_slices(tp_rank, tmp_path):
    words = torch.randn(5, 2)
    whole = torch.arange(24.0).reshape(6, 4)
    sub = SubparamShape(patterns=["w"], shape=((4, 2), 4), partition_dim=0)
    cases = {
        "row": (whole, {"cat_dim": 1}, whole.chunk(2, dim=1)[tp_rank]),
        "column": (whole, {"cat_dim": 0}, whole.chunk(2)[tp_rank]),
        "replica": (whole, {}, whole),
        "halves": (whole[:4], {"cat_dim": 0, "param_n_sub_params": 2},
                   torch.stack([whole[tp_rank], whole[2 + tp_rank]])),
        "sub": (whole, {"cat_dim": 0, "sub_param_shape": sub},
                torch.cat([whole[:4].chunk(2)[tp_rank], whole[4:].chunk(2)[tp_rank]])),
        "words": (words, {"cat_dim": 0, "vocab_tensor": True},
                  torch.cat([words, torch.zeros(3, 2)]).chunk(2)[tp_rank]),
    }  # fmt: skip
    for name, (value, hints, wanted) in cases.items():
        path = write(tmp_path, name, fp32={"param": value, **hints})
        param = torch.nn.Parameter(torch.zeros_like(wanted))
        flat = linked([param], 0, 1)
        param.load_hp_checkpoint_state(path, tp_rank, 2)
        assert torch.equal(flat, wanted.reshape(-1)), name


def test_experts_of_a_rank(tmp_path):
    whole = torch.arange(8.0).reshape(4, 2)
    path = write(tmp_path, "experts", fp32={"param": whole, "is_expert_param": True, "ep_num_experts": 4})
    param = torch.nn.Parameter(torch.zeros(2, 2))
    flat = linked([param], 0, 1)
    param.load_hp_checkpoint_state(path, 0, 1, ep_rank=1, ep_size=2)
    assert torch.equal(flat, whole[2:].reshape(-1))


def test_what_does_not_fit_is_said(tmp_path):
    param = torch.nn.Parameter(torch.zeros(4))
    linked([param], 0, 1)
    refused(FileNotFoundError, "nothing", param.load_hp_checkpoint_state, str(tmp_path / "nothing"), 0, 1)
    path = write(tmp_path, "w", fp32={"param": torch.zeros(3), "cat_dim": 0})
    refused(ValueError, "another model", param.load_hp_checkpoint_state, path, 0, 1)
    refused(ValueError, "3 elements cannot be cut into 2", param.load_hp_checkpoint_state, path, 0, 2)
    path = write(tmp_path, "words", fp32={"param": torch.zeros(9), "cat_dim": 0, "vocab_tensor": True})
    refused(ValueError, "9 words", param.load_hp_checkpoint_state, path, 0, 2)


def test_sub_parameters_are_narrowed():
    full = torch.arange(18.0).reshape(9, 2)
    assert torch.equal(_narrow_sub_params(full[:6], 0, (4, 2), None, 1, 2, 0.4), torch.cat([full[2:4], full[5:6]]))
    uneven = _narrow_sub_params(full, 0, (6, 3), [[4, 2], [2, 1]], 1, 2, 0.4)
    assert torch.equal(uneven, torch.cat([full[4:6], full[8:9]]))
    columns = _narrow_sub_params(full.t(), 1, (6, 3), [[4, 2], [2, 1]], 0, 2, 0.4)
    assert torch.equal(columns, torch.cat([full[:4], full[6:8]]).t())
    refused(ValueError, "version 0.4.*cannot be cut", _narrow_sub_params, full, 0, (6, 3), None, 1, 2, 0.4)


def test_notes_of_automatic_tensor_parallelism():
    full = torch.arange(24.0).reshape(6, 4)
    param = torch.nn.Parameter(torch.zeros(3, 4))
    assert _get_param_uc_restore_meta(param) is None and _resolve_autotp_partition(param, {}, full, 0, 2) is None

    def part(rank, **meta):
        setattr(param, keys.DS_AUTOTP_UC_META, meta)
        return _resolve_autotp_partition(param, {keys.PARAM: full}, full, rank, 2)

    assert torch.equal(part(1, partition_dim=0), full[3:].reshape(-1))
    assert torch.equal(part(1, partition_dim=1), full[:, 2:].reshape(-1))
    assert torch.equal(part(0, partition_dim=0, partition_sizes=[4, 2]), full[:4].reshape(-1))
    assert torch.equal(part(0, partition_dim=0, replicated=True), full.reshape(-1))
    assert torch.equal(part(0, partition_dim=None), full.reshape(-1))
    assert torch.equal(part(0, partition_dim=0, sub_param_sizes=(4, 2)), torch.cat([full[:2], full[4:5]]).reshape(-1))
    assert torch.equal(part(1, partition_dim=0, logical_shape=(2, 12)), full.reshape(2, 12)[1])
    refused(ValueError, "gives a slice", part, 0, partition_dim=0, target_partition_shape=(5, 4))
    refused(ValueError, "because", part, 0, unsupported_reason="because")


def test_the_latest_value_belongs_to_the_key_of_each_reader():
    """A reader that is interrupted by another one, as by a thread, gets the value of its own key."""
    latest, made = Latest(), []

    def make(key, interrupts=None):
        made.append(key)
        if interrupts is not None:
            assert latest.value(interrupts, lambda: make(interrupts)) == interrupts.upper()
        return key.upper()

    assert latest.value("a", lambda: make("a", interrupts="b")) == "A"
    assert latest.value("a", lambda: make("a")) == "A" and made == ["a", "b"]
