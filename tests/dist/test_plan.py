"""``deepspeed.plan`` against runs: the calls of a step and the memory of the device at its peak."""

import functools
import sys
from unittest import mock

import pytest
import torch

import auto_ep_runs
import deepspeed
import devices
import fake_nccl
import toy_transformers
from deepspeed import _native
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.timed import call_log
from deepspeed.moe import gating
from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from deepspeed.moe.layer import MoE
from deepspeed.planner import Machine
from deepspeed.planner.measure import main as measure_machine
from deepspeed.zero.nested import loss_in
from engine_models import batch, config, loss_of, make_net, net_engine
from folded_models import folded_model_of, moe_model_of
from harness import on_ranks, run_ranks
from hf_like_moe import EXPERTS, model_of
from models import beside, seeded
from moe_models import moe_layer
from plan_calls import calls_of, planned_calls
from runs import engine_of, settings, take_step

HOST = {"offload_optimizer": {"device": "cpu"}}
ON_CPU = devices.NAME == "cpu"
# The peak of a process counts memory that other tests have left there, so tests of peaks get new processes.
PEAK = {"fresh": not ON_CPU}


@pytest.fixture(scope="module", autouse=True)
def nccl(tmp_path_factory):
    """Plans are of jobs over NCCL. The stand-in device has a library with NCCL's interface."""
    with fake_nccl.on_the_standin(tmp_path_factory):
        yield


def is_peak_of(plan, peak):
    """Ranks that share a GPU use gloo: their gradients leave the device when they are sent. Over NCCL those of a bucket
    stay until the next bucket leaves, which is planned."""
    by_gloo = devices.NAME != "standin" and plan.world > get_accelerator().device_count()
    return 0.9 * peak <= plan.peak_bytes <= (1.25 if by_gloo else 1.1) * peak


def step_of(engine, rank, world, accumulate):
    for number in range(accumulate):
        tokens, targets = (part.chunk(world)[rank] for part in batch(number, 8 * accumulate))
        tokens, targets = (part[: 8 // world] for part in (tokens, targets))
        take_step(engine, loss_of(engine(beside(engine, tokens)), targets))


@pytest.mark.any_device
@pytest.mark.parametrize(
    "world, stage, accumulate, more",
    [
        pytest.param(2, 0, 1, {}, marks=pytest.mark.skipif(ON_CPU, reason="kernels of the CPU cannot fail")),
        (2, 1, 2, {}),
        (2, 2, 1, {}),
        (2, 2, 2, {"bf16": {"enabled": True}}),
        (2, 2, 1, {"zero": HOST}),
        pytest.param(2, 3, 1, {}, marks=pytest.mark.skipif(ON_CPU, reason="ranks of one host read shared memory")),
        pytest.param(2, 3, 2, {"zero": HOST}, marks=pytest.mark.skipif(ON_CPU, reason="as above")),
    ],
)
@on_ranks(init=True, **PEAK)
def test_calls_and_peaks_are_those_of_a_run(rank, world, stage, accumulate, more):
    engine = net_engine(world, stage, accumulate=accumulate, **more)
    for _ in range(2):  # Two backwards show which gathers a step needs.
        step_of(engine, rank, world, accumulate)
    recorder = _native._C.CallRecorder(False)
    call_log.add(recorder)
    get_accelerator().reset_peak_memory_stats()
    step_of(engine, rank, world, accumulate)
    get_accelerator().synchronize()
    ran, peak = recorder.take(), get_accelerator().max_memory_allocated()
    call_log.remove(recorder)
    engine.destroy()
    zero = {"stage": stage, **more.pop("zero", {})}
    given = config(world, accumulate, zero_optimization=zero, **more)
    tokens, targets = (part[: 8 // world // accumulate] for part in batch(0, 8))
    loss = functools.partial(loss_of, targets=targets)
    plan = deepspeed.plan(make_net, given, world, sample=tokens, ranks=[rank], loss=loss)
    assert planned_calls(plan) == calls_of(ran)
    if ON_CPU:
        return  # has no allocator that counts
    assert is_peak_of(plan, peak), (plan.peak_bytes, peak)


def check(rank, world, model, config, inputs):
    """The calls of a step are those of the plan; on a device with an allocator that counts, its peak, too."""
    plan = deepspeed.plan(model, config, world, sample=inputs, ranks=[rank])
    engine = engine_of(model, config)
    inputs = inputs if isinstance(inputs, dict) else {"x": inputs}
    given = {name: beside(engine, one) for name, one in inputs.items()}
    for _ in range(3):  # Two backwards show which gathers a step needs.
        recorder = _native._C.CallRecorder(False)
        call_log.add(recorder)
        get_accelerator().reset_peak_memory_stats()
        take_step(engine, loss_in(engine(**given)))
        get_accelerator().synchronize()
        call_log.remove(recorder)
    assert planned_calls(plan) == calls_of(recorder.take())
    if not ON_CPU:
        peak = get_accelerator().max_memory_allocated()
        assert is_peak_of(plan, peak), (plan.peak_bytes, peak)
    engine.destroy()


class Deep(torch.nn.Module):
    """Gradients are most of what a step needs: each layer has a bucket of its own."""

    BUCKET = 256 * 256 + 256

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


@pytest.mark.any_device
@pytest.mark.skipif(ON_CPU, reason="the CPU has no allocator that counts")
@pytest.mark.parametrize("stage, more", [(2, {}), (2, HOST), (3, {}), (3, HOST)])
@on_ranks(2, init=True, **PEAK)
def test_gradients_that_have_been_sent_are_not_kept(rank, world, stage, more):
    zero = {"reduce_bucket_size": Deep.BUCKET, "overlap_comm": True, **more}
    check(rank, world, seeded(Deep), settings(stage, zero=zero), torch.ones(2, 256))


@pytest.mark.parametrize("world, section", [(2, {"size": 2}), (2, {"size": 2, "method": "ring"}), (4, {"size": 2})])
@on_ranks(init=True)
def test_the_calls_of_ranks_that_share_sequences(rank, world, section):
    with toy_transformers.installed():
        shape = {"heads": 4, "kv": 2, "hidden": 32, "layers": 2, "intermediate": 64, "vocabulary": 100}
        ids = torch.zeros(2, 32, dtype=torch.int64)
        model, sample = seeded(toy_transformers.ToyForCausalLM, **shape), {"input_ids": ids, "labels": ids}
        check(rank, world, model, settings(1, sequence_parallel=section), sample)


WIDTH, TOKENS = 64, 256


class Experts(torch.nn.Module):
    def __init__(self, **given):
        super().__init__()
        expert = torch.nn.Sequential(torch.nn.Linear(WIDTH, 256), torch.nn.GELU(), torch.nn.Linear(256, WIDTH))
        self.first, self.moe = torch.nn.Linear(WIDTH, WIDTH), MoE(WIDTH, expert, num_experts=4, **given)

    def forward(self, x):
        output, loss, _ = self.moe(self.first(x))
        return output.square().mean() + loss


def balanced_gate(logits, k, select=None, gate=gating.gate):
    probs, experts = gate(logits, k, select)
    return probs, experts.copy_((torch.arange(experts.numel()) % logits.shape[1]).view_as(experts))


def balanced_route(router, x, bias=None, route=TokenChoiceTopKRouter.route):
    found = route(router, x, bias)
    return found._replace(experts=torch.arange(found.experts.numel(), device=x.device).view_as(found.experts) % EXPERTS)


@pytest.mark.any_device
@pytest.mark.parametrize(
    "world, stage, given",
    [
        (2, 1, {"drop_tokens": False}),
        (2, 3, {"drop_tokens": False, "k": 2}),
        (4, 2, {"drop_tokens": False, "k": 3, "use_residual": True}),
        (2, 2, {"k": 1}),
        (2, 1, {"k": 2}),
    ],
)
@on_ranks(init=True, **PEAK)
def test_the_calls_and_peaks_of_ranks_that_share_experts(rank, world, stage, given):
    """With equal load."""
    if ON_CPU and given.get("drop_tokens", True):
        pytest.skip("ranks on the CPU compare their capacities")
    if ON_CPU and stage == 3:
        pytest.skip("ranks of one host read shared memory")
    model = seeded(Experts, ep_size=2, **given)
    with mock.patch.object(gating, "gate", balanced_gate):
        check(rank, world, model, settings(stage, rows=TOKENS), torch.ones(TOKENS, WIDTH))


@pytest.mark.any_device
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
@on_ranks(2, init=True, **PEAK)
def test_the_calls_of_unchanged_models_with_experts(rank, world, family):
    with mock.patch.object(TokenChoiceTopKRouter, "route", balanced_route):
        check(rank, world, model_of(family), auto_ep_runs.config(2, 2, 2), torch.ones(2, 4, auto_ep_runs.WIDTH))


@pytest.mark.parametrize("ep_size", [1, 2])
@on_ranks(2, init=True)
def test_the_calls_of_ranks_that_cut_layers_and_share_experts(rank, world, ep_size):
    more = {"tensor_parallel": {"autotp_size": 2}, "train_batch_size": 4}
    with mock.patch.object(TokenChoiceTopKRouter, "route", balanced_route):
        made = auto_ep_runs.config(2, 1, ep_size, **more)
        check(rank, world, folded_model_of("mixtral"), made, torch.ones(2, 4, auto_ep_runs.WIDTH))


@on_ranks(2, init=True)
def test_the_calls_of_ranks_that_cut_experts(rank, world):
    layer = moe_layer(4, 1, 2, False, False, enable_expert_tensor_parallelism=True)
    model = moe_model_of(layer, layer.deepspeed_moe.gate.wg, {})
    with mock.patch.object(gating, "gate", balanced_gate):
        more = {"tensor_parallel": {"autotp_size": 2}}
        check(rank, world, model, settings(1, rows=8, **more), torch.ones(8, auto_ep_runs.WIDTH))


def _measure(rank, world, path):
    with mock.patch.object(sys, "argv", ["measure", path]):
        measure_machine()


@pytest.mark.parametrize("world", [1, 2])
def test_one_rank_has_no_links_to_measure(world, tmp_path):
    path = str(tmp_path / "machine.json")
    run_ranks(world, _measure, path)
    found = Machine.read(path)
    assert ("links assumed" in found.name) == (world == 1)
    assert found.inside[1] > 0 and found.flops["float32"] > 1e8
