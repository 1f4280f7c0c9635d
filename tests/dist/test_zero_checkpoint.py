"""Saving and resuming at ZeRO stages 1 to 3: bit by bit, under the file names and keys that others read."""

import os

import pytest
import torch

from deepspeed.utils import safe_get_full_fp32_param
from engine_models import make_net, net_engine
from harness import on_ranks, run_ranks
from programs import TOKENS, WARMUP
from runs import SMALL_PARTS, load_into, weights
from test_checkpoint import PRECISIONS, same, trained


def make_engine(world, stage, precision, seed=0, optimizer=None, **zero):
    zero = {**SMALL_PARTS, "stage3_gather_16bit_weights_on_model_save": True, **zero}
    more = {"size": 8 if world != 3 else 12, "scheduler": WARMUP, **precision}
    return net_engine(world, stage, 2, seed=seed, client=optimizer, zero=zero, data=TOKENS, **more)


def body_files(rank, world, folder, stage, precision):
    engine = trained(make_engine(world, stage, precision), 1)
    engine.save_checkpoint(folder, tag="t")
    assert engine.save_16bit_model(folder) is True
    return weights(engine)


@pytest.mark.sample("values")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_file_names_and_keys(stage, precision, tmp_path):
    found = run_ranks(2, body_files, str(tmp_path), stage, PRECISIONS[precision])[0]
    prefix = "bf16_" if precision == "bf16" else ""
    model_files = (
        {"zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"}
        if stage == 3
        else {"mp_rank_00_model_states.pt"}
    )
    assert set(os.listdir(tmp_path / "t")) == model_files | {
        f"{prefix}zero_pp_rank_0_mp_rank_00_optim_states.pt",
        f"{prefix}zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "checkpoint_manifest.json",
        "run_rank_00000_state.pt",
        "run_rank_00001_state.pt",
    }
    model = torch.load(tmp_path / "t" / sorted(model_files)[0], weights_only=False)
    net = make_net()
    trained = {n: p for n, p in net.named_parameters() if p.requires_grad}
    assert [list(group) for group in model["param_shapes"]] == [list(trained)]
    assert all(model["param_shapes"][0][n] == p.shape for n, p in trained.items())
    assert model["shared_params"] == {"tied.weight": "first.weight"}
    if stage >= 2:
        assert model["frozen_param_shapes"] == {"frozen.weight": torch.Size([12, 12])}
    paths = [tmp_path / "t" / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    shards = [torch.load(path, weights_only=False) for path in paths]
    assert set(shards[0]) == {"optimizer_state_dict", "ds_config", "ds_version"}
    states = [shard["optimizer_state_dict"] for shard in shards]
    assert states[0]["zero_stage"] == stage
    numel = sum(p.numel() for p in trained.values())
    if stage < 3:
        groups = [state["single_partition_of_fp32_groups"] for state in states]
        assert sum(g[0].numel() for g in groups) == numel
        assert states[0]["partition_count"] == [2]
        flat, offset = torch.cat([g[0] for g in groups]), 0
        for name, param in trained.items():
            whole = flat[offset : offset + param.numel()].reshape(param.shape)
            assert torch.equal(whole.to(found[name].dtype), found[name]), name
            offset += param.numel()
        assert states[0]["base_optimizer_state"]["state"][0]["exp_avg"].numel() == groups[0][0].numel()
        assert list(states[0]["param_slice_mappings"][0])[0] == next(iter(trained))
    else:
        assert states[0]["partition_count"] == 2
        assert sum(g.numel() for g in states[0]["fp32_flat_groups"]) == sum(
            -(-p.numel() // 2) for p in trained.values()
        )
    saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert set(saved) == set(net.state_dict())
    for name, value in found.items():
        assert torch.equal(saved[name], value), name


def body_save(rank, world, folder, stage):
    engine = trained(make_engine(world, stage, PRECISIONS["bf16"]), 2)
    engine.save_checkpoint(folder)
    return weights(engine), [safe_get_full_fp32_param(param) for param in engine.module.parameters()]


def body_load(rank, world, folder, stage, seed):
    engine = load_into(make_engine(world, stage, PRECISIONS["bf16"], seed=seed, reduce_bucket_size=500), folder)
    return weights(engine), [safe_get_full_fp32_param(param) for param in engine.module.parameters()]


@pytest.mark.sample("values")
@pytest.mark.parametrize("other", [1, 3])
@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_load_into_another_world(stage, other, tmp_path):
    saved = run_ranks(2, body_save, str(tmp_path), stage)[0]
    for found in run_ranks(other, body_load, str(tmp_path), stage, 9):
        assert same(saved[0], found[0]) and same(saved[1], found[1])


@on_ranks(2)
def test_16bit_model_of_stage_3_needs_the_key(rank, world, folder):
    engine = make_engine(world, 3, {}, stage3_gather_16bit_weights_on_model_save=False)
    assert (engine._zero3_consolidated_16bit_state_dict() is not None) == (rank == 0)
    assert engine.save_16bit_model(folder) is False
    assert not os.listdir(folder)
