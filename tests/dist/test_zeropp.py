"""ZeRO++ and MixZ++: weights that travel as codes (qwZ), a second copy inside groups of ranks (hpZ), frozen weights as
codes. C++ tests (tests/cpp/zero/zeropp_test.cpp) compare the arithmetic; here are engines, files and errors."""

import functools
import os

import pytest
import torch

import deepspeed
from deepspeed.planner.machine import here
from deepspeed.utils import safe_get_full_fp32_param
from engine_models import make_net, net_engine, plain_net, train_engine
from harness import on_ranks
from plan_calls import calls_of, calls_while, planned_calls
from refusals import refused
from runs import DTYPES, equal_bits, take_step, together, value_of, weight_list

ALL = {"zero_quantized_weights": True, "zero_hpz_partition_size": 2}
SMALL = {"stage3_param_persistence_threshold": 20}


def trained(rank, world, zero, steps=5, **more):
    engine = net_engine(world, 3, zero={**SMALL, **zero}, **more)
    train_engine(engine, steps, rank, world)
    return engine


@pytest.mark.any_device("list")
@pytest.mark.parametrize("dtype, hosts", [("fp32", "aaaa"), ("bf16", "aabb"), ("fp32", "aabb")])
@on_ranks(4)
def test_a_second_copy_changes_no_bit(rank, world, dtype, hosts):
    os.environ["DS_HOST_ID"] = hosts[rank]

    def run(zero):
        return trained(rank, world, zero, **DTYPES[dtype]), None

    equal_bits(run, {}, {"zero_hpz_partition_size": 2})


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@on_ranks(4)
def test_a_second_copy_of_offloaded_parameters_changes_no_bit(rank, world, device, tmp_path):
    os.environ["DS_HOST_ID"] = "aabb"[rank]
    offload = {"offload_param": {"device": device, "nvme_path": str(tmp_path), "max_in_cpu": 0}}

    def run(zero):
        return trained(rank, world, {**offload, **zero}, bf16={"enabled": True}), None

    equal_bits(run, {}, {"zero_hpz_partition_size": 2})


@pytest.mark.parametrize("codes", [False, True])
@on_ranks(4)
def test_hierarchical_gathers_of_mics_change_no_bit(rank, world, codes):
    """Ranks of one host gather from each other, as with hpZ."""
    os.environ["DS_HOST_ID"] = "aabb"[rank]

    def run(zero):
        mics = {"mics_shard_size": 4, "zero_quantized_weights": codes}
        engine = trained(rank, world, {**mics, **zero}, bf16={"enabled": True})
        weight = engine.module.out.weight
        if not zero:
            assert weight.ds_secondary_tensor is None
            return engine, None
        assert weight.ds_secondary_tensor.numel() == 2 * weight.ds_tensor.numel()
        inner = deepspeed.comm.get_all_ranks_from_group(weight.ds_zero_param_process_group)
        assert inner == [[0, 1], [2, 3]][rank // 2]
        return engine, None

    equal_bits(run, {}, {"mics_hierarchical_params_gather": True})


@on_ranks(4)
def test_hierarchical_gathers_inside_a_host_are_plain_ones(rank, world):
    os.environ["DS_HOST_ID"] = "aabb"[rank]
    engine = trained(rank, world, {"mics_shard_size": 2, "mics_hierarchical_params_gather": True}, steps=2)
    assert engine.module.out.weight.ds_secondary_tensor is None


@on_ranks(4, init=True)
def test_members_of_parameters(rank, world):
    engine = net_engine(world, 3, zero={**SMALL, "zero_hpz_partition_size": 2}, bf16={"enabled": True})
    for param in engine.module.parameters():
        second = param.ds_secondary_tensor
        assert second.numel() == 2 * param.ds_tensor.numel() and second.size(0) % param.ds_tensor.size(0) == 0
        assert deepspeed.comm.get_all_ranks_from_group(param.ds_zero_param_process_group) == [[0, 1], [2, 3]][rank // 2]
    weight = engine.module.out.weight
    whole = value_of(weight).flatten()
    size = weight.ds_tensor.numel()
    padded = torch.cat([whole, whole.new_zeros(4 * size - whole.numel())]).view(4, size)
    assert torch.equal(weight.ds_secondary_tensor, padded[rank % 2 :: 2].flatten())
    plain = net_engine(world, 3)
    assert all(
        p.ds_secondary_tensor is None and p.ds_zero_param_process_group is None for p in plain.module.parameters()
    )


@on_ranks(4)
def test_codes_are_half_of_the_bytes_and_masters_stay_exact(rank, world):
    os.environ["DS_HOST_ID"] = "abcd"[rank]

    def made(zero):
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(2)))
        return adapter_engine({"stage3_param_persistence_threshold": 0, **zero}, model)

    def gathered(engine):
        def step():
            x = torch.ones(2, 256, dtype=torch.bfloat16) * (rank + 1)
            take_step(engine, engine(x).float().square().mean())

        step()
        step()
        return sum(call.bytes for call in calls_while(step) if call.op.startswith("all_gather"))

    plain, coded = made({}), made({"zero_quantized_weights": True})
    assert gathered(coded) < 0.53 * gathered(plain)  # codes, 2 bytes in 256 for scales, and what ranks want to gather
    for param in coded.module.parameters():
        assert torch.equal(value_of(param), safe_get_full_fp32_param(param).bfloat16())


def crossing(call):
    """Bytes that a rank sends to other hosts, if each byte crosses once. Two ranks share a host."""
    ranks = [int(one) for one in call.group.split("/")[2].split(",")]
    here = len({rank // 2 for rank in ranks})
    each = len(ranks) // here  # ranks of a host
    share = {"all_gather": here - 1, "reduce_scatter": (here - 1) / here / each, "all_to_all": (here - 1) / here,
             "all_reduce": 2 * (here - 1) / here / each}  # fmt: skip
    return call.bytes * share[call.op]


ZEROPP = {**ALL, "zero_quantized_gradients": True}
# Weights are gathered for forward and again for backward.
TWICE = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


def layers():
    torch.manual_seed(5)
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))


def mean_square(out):
    return out.float().square().mean()


def one_step(engine, x):
    take_step(engine, mean_square(engine(x)))


@on_ranks(4)
def test_all_three_send_a_quarter_between_hosts(rank, world):
    os.environ["DS_HOST_ID"] = "aabb"[rank]
    sent = []
    for zero in ({}, ZEROPP):
        engine = adapter_engine({**TWICE, **zero}, layers())
        x = torch.ones(2, 512, dtype=torch.bfloat16) * (rank + 1)

        for _ in range(4):
            calls = calls_while(functools.partial(one_step, engine, x))
        sent.append(sum(map(crossing, calls)))
        large = [call for call in calls if call.op == "all_gather" and call.bytes > 1000 and crossing(call)]
        assert len(large) == (1 if zero else 7), large  # the last layer stays for its backward
        engine.destroy()
    # Stage 3 gathers all but one of the layers twice; without that exception it would send a little more.
    assert sent[0] + 2 * 512 * 513 / 4 > 3.9 * sent[1], sent


@pytest.mark.parametrize("zero", [{}, {"zero_quantized_weights": True}, {"zero_hpz_partition_size": 2}, ZEROPP])
@on_ranks(4)
def test_a_plan_has_the_calls_of_a_step(rank, world, zero):
    os.environ["DS_HOST_ID"] = "aabb"[rank]
    engine, x = adapter_engine({**TWICE, **zero}, layers()), torch.ones(2, 512, dtype=torch.bfloat16)

    for _ in range(4):
        ran = calls_of(calls_while(functools.partial(one_step, engine, x)))
    if rank == 0:
        made, machine = adapter_config({**TWICE, **zero}), here(ranks_of_host=2)
        plan = deepspeed.plan(layers, made, world, sample=x, ranks=[0], loss=mean_square, machine=machine)
        assert planned_calls(plan) == ran
    deepspeed.comm.barrier()


@pytest.mark.parametrize("zero", [{"zero_quantized_weights": True}, ALL])
@on_ranks(4, init=True)
def test_checkpoints_are_exact(rank, world, zero, tmp_path):
    folder = together(str(tmp_path))[0]
    engine = trained(rank, world, zero, bf16={"enabled": True})
    engine.save_checkpoint(folder)
    losses, _ = train_engine(engine, 3, rank, world, start=5)
    values = weight_list(engine)
    again = net_engine(world, 3, zero={**SMALL, **zero}, bf16={"enabled": True}, seed=3)
    again.load_checkpoint(folder)
    resumed, _ = train_engine(again, 3, rank, world, start=5)
    assert losses == resumed
    assert all(torch.equal(a, b) for a, b in zip(values, weight_list(again)))


@on_ranks(2, init=True)
def test_training_stays_close_to_one_plain_process(rank, world):
    losses, _ = train_engine(net_engine(world, 3, zero={"zero_quantized_weights": True}), 30, rank, world)
    plain = plain_net(30)
    mean = [sum(one) / world for one in zip(*together(losses))]
    assert mean[-1] == pytest.approx(plain.losses[-1][0], rel=0.02)


@on_ranks(2, init=True)
def test_an_evaluation_by_one_rank(rank, world):
    """Between two steps one rank alone runs the model."""
    engine = trained(rank, world, {"zero_quantized_weights": True})
    tokens = torch.arange(12).view(2, 6)
    if rank == 0:
        with torch.no_grad():
            first = engine(tokens)
            assert torch.equal(first, engine(tokens))
    train_engine(engine, 1, rank, world, start=9)


# ---- MixZ++ -------------------------------------------------------------------------------------------------------
class Adapted(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down, self.up = torch.nn.Linear(linear.in_features, 2), torch.nn.Linear(2, linear.out_features)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


def adapted(width=96):
    torch.manual_seed(5)
    return torch.nn.Sequential(*(Adapted(torch.nn.Linear(width, width)) for _ in range(2)))


def adapter_config(zero, dtype="bf16"):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100, **zero},
        **DTYPES[dtype],
    }


def adapter_engine(zero, model=None, dtype="bf16"):
    made = adapter_config(zero, dtype)
    return deepspeed.initialize(model=adapted() if model is None else model, config=made)[0]


def adapter_steps(engine, rank, steps=4):
    def loss_at(step):
        x = torch.sin(torch.arange(2 * 96.0).view(2, 96) * 0.1 + step + 10 * rank)
        return engine(x.to(engine.module[0].up.weight.dtype)).float().square().mean()

    return [take_step(engine, loss_at(step)) for step in range(steps)]


MIXED = {"zero_quantized_nontrainable_weights": True}


@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks(init=True)
def test_frozen_weights_rest_as_codes_by_key_by_call_and_by_zero_init(rank, world):
    more = {"zero_hpz_partition_size": 2} if world == 4 else {}
    by_key, by_call = adapter_engine({**MIXED, **more}), adapter_engine(more)
    by_call.optimizer.quantize_nontrainable_params()
    with deepspeed.zero.Init(dtype=torch.bfloat16, zero_quantized_nontrainable_weights=True):
        model = adapted()
    by_init = adapter_engine(more, model)
    found = []
    for engine in (by_key, by_call, by_init):
        frozen = [p for p in engine.module.parameters() if not p.requires_grad]
        assert all(p.ds_handle.rests_as_codes for p in frozen)
        weight = engine.module[0].linear.weight
        assert weight.ds_handle.resting_bytes < 1.05 * weight.ds_tensor.numel()
        before = [value_of(p) for p in frozen]
        losses = adapter_steps(engine, rank)
        assert all(torch.equal(value_of(p), old) for p, old in zip(frozen, before))
        found.append((losses, weight_list(engine)))
    for losses, values in found[1:2]:
        assert losses == found[0][0] and all(torch.equal(a, b) for a, b in zip(values, found[0][1]))
    assert all(v.isfinite().all() for v in found[2][1])


@on_ranks(2, init=True)
def test_files_have_the_decoded_values(rank, world, tmp_path):
    folder = together(str(tmp_path))[0]
    engine = adapter_engine({**MIXED, "stage3_gather_16bit_weights_on_model_save": True})
    adapter_steps(engine, rank)
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder)
    values = {name: value_of(p) for name, p in engine.module.named_parameters()}
    if rank == 0:
        saved = torch.load(os.path.join(folder, "pytorch_model.bin"))
        assert saved.keys() == values.keys() and all(torch.equal(saved[name], values[name]) for name in saved)
    again = adapter_engine(MIXED)
    again.load_checkpoint(folder)
    for name, param in again.module.named_parameters():
        assert torch.equal(value_of(param), values[name]), name
    assert adapter_steps(engine, rank) == adapter_steps(again, rank)


@on_ranks(2, init=True)
def test_frozen_weights_can_be_written_and_merged(rank, world):
    engine = adapter_engine(MIXED)
    layer = engine.module[0]
    with deepspeed.zero.GatheredParameters(list(layer.parameters()), modifier_rank=0):
        if rank == 0:
            with torch.no_grad():
                layer.linear.weight += layer.up.weight @ layer.down.weight
                merged = layer.linear.weight.clone()
    values = value_of(layer.linear.weight)
    if rank == 0:
        scale = merged.float().abs().max() / 127
        assert (values.float() - merged.float()).abs().max() <= 0.51 * scale + 0.004 * merged.float().abs().max()
    deepspeed.comm.barrier()  # the other rank may still read this slice
    layer.linear.weight.ds_tensor.data = torch.ones_like(layer.linear.weight.ds_tensor)
    deepspeed.comm.barrier()
    assert torch.equal(value_of(layer.linear.weight), torch.ones_like(values))


@on_ranks(2, init=True)
def test_trained_weights_that_are_frozen_later_take_decoded_values(rank, world):
    engine = net_engine(world, 3, zero=SMALL, bf16={"enabled": True})
    train_engine(engine, 2, rank, world)
    weight = engine.module.first.weight
    before = value_of(weight)
    weight.requires_grad_(False)
    engine.optimizer.quantize_nontrainable_params()
    after = value_of(weight)
    assert not torch.equal(before, after) and (before - after).abs().max() <= before.abs().max() / 127
    assert torch.equal(safe_get_full_fp32_param(weight).bfloat16(), after)


# ---- errors and warnings ------------------------------------------------------------------------------------------
@on_ranks(4, init=True)
def test_a_size_that_does_not_divide_the_ranks_is_an_error_on_each(rank, world):
    refused(ValueError, "zero_hpz_partition_size.*3", net_engine, world, 3, zero={"zero_hpz_partition_size": 3})


@on_ranks(1, init=True)
def test_one_rank_has_no_use_for_codes_and_copies(rank, world):
    engine = net_engine(world, 3, zero={"zero_quantized_weights": True, "zero_hpz_partition_size": 2})
    plain = net_engine(world, 3)
    for one in (engine, plain):
        train_engine(one, 2, rank, world)
    assert all(torch.equal(a, b) for a, b in zip(weight_list(engine), weight_list(plain)))


@on_ranks(4, init=True)
def test_invalidated_copies_are_made_anew(rank, world):
    engine = trained(rank, world, {"zero_hpz_partition_size": 2})
    weight = engine.module.out.weight
    with torch.no_grad():
        weight.ds_handle.second.zero_()  # as if it had been damaged
    deepspeed.comm.barrier()
    engine.optimizer.invalidate_secondary_tensor()
    with torch.no_grad():
        engine(torch.arange(6).view(1, 6))
    assert weight.ds_secondary_tensor.abs().sum() > 0


@on_ranks(2, init=True)
def test_the_group_of_zero_init_is_that_of_the_engine(rank, world):
    group = deepspeed.comm.new_group([0, 1])
    with deepspeed.zero.Init(dtype=torch.bfloat16, zero_param_parallel_group=group, zero_quantized_weights=True):
        model = make_net()
    engine = net_engine(world, 3, model=model, bf16={"enabled": True})
    assert deepspeed.comm.get_all_ranks_from_group(engine.module.out.weight.ds_zero_param_process_group) == [0, 1]
    assert engine.core.gatherer.source != ""
    train_engine(engine, 2, rank, world)
