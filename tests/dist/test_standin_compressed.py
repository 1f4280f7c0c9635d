"""1-bit optimizers, ZeRO++ and MixZ++ on the stand-in device with the CUDA kernels and its NCCL: the bits of the CPU
for every seed and in both modes, and no access without an order. In fp32: NCCL rounds sums of 16 bits earlier."""

import os

import pytest
import standin
import standin_kernels
import torch

import deepspeed
import fake_nccl
from harness import run_ranks
from models import seeded
from onebit_models import KINDS, section
from runs import engine_of, settings, take_step, weights
from sampling import every_case

pytestmark = pytest.mark.skipif(not standin.supported(), reason="the stand-in device needs torch 2.9 or newer")

SEEDS = (1, 2, 3, 4, 5) if every_case() else (1, 2)  # with odd ones all is lazy
STEPS = 8
ZEROPP = {"zero_quantized_weights": True, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True}
SMALL = {"stage3_param_persistence_threshold": 20, "reduce_bucket_size": 800}


class Net(torch.nn.Module):
    """The first layer is frozen where ``frozen`` is true."""

    def __init__(self, frozen):
        super().__init__()
        self.first, self.inner = torch.nn.Linear(12, 40), torch.nn.Linear(40, 40)
        self.out = torch.nn.Linear(40, 4)
        self.first.requires_grad_(not frozen)

    def forward(self, x):
        return self.out(torch.tanh(self.inner(torch.tanh(self.first(x)))))


# name: (ranks, stage, settings, keys of zero_optimization, whether a layer is frozen)
CASES = {
    **{kind: (2, 0, {"optimizer": section(kind)}, {}, False) for kind in sorted(KINDS)},
    "ZeRO++": (4, 3, {}, ZEROPP, False),
    "stage 3": (4, 3, {}, {}, False),
    "hpZ": (4, 3, {}, {"zero_hpz_partition_size": 2}, False),
    "LoCo": (4, 2, {}, {"zero_quantized_gradients": True, "zeropp_loco_param": {}}, False),
    "MixZ++": (2, 3, {}, {"zero_quantized_nontrainable_weights": True}, True),
}


def trained(rank, name):
    """The losses and the weights of a run, on the host."""
    _, stage, given, zero, frozen = CASES[name]
    made = settings(stage, rows=4, dtype="fp32", zero={**SMALL, **zero} if stage else {}, **given)
    engine = engine_of(seeded(Net, frozen), made)
    losses = []
    for step in range(STEPS):
        drawn = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(4, 12, generator=drawn).to(engine.device)
        losses.append(take_step(engine, (engine(x) - x[:, :4]).square().mean()))
    found = [one.cpu() for one in weights(engine).values()]
    engine.destroy()
    return torch.tensor(losses), found


def on_cpu(rank, world, name):
    os.environ["DS_HOST_ID"] = "aabb"[rank]
    return trained(rank, name)


def on_standin(rank, world, name):
    os.environ.update(DS_HOST_ID="aabb"[rank], LOCAL_RANK=str(rank % 2))  # there are two devices
    deepspeed.accelerator.set_accelerator(standin.Standin_Accelerator())
    found = []
    for seed in SEEDS:
        standin.choose(seed, lazy=seed % 2 == 1)
        found.append(trained(rank, name))
        assert standin.faults_at_end() == []
    return found


def found_on_standin(name, folder):
    env = {"DS_STANDIN_KERNELS": standin_kernels.library_path(), "DS_STANDIN_NCCL": fake_nccl.build(folder)}
    return run_ranks(CASES[name][0], on_standin, name, init=True, fresh=True, env=env, timeout=400)


def equal(expected, found):
    for (losses, values), of_seeds in zip(expected, found):
        for seed, (ours, own) in zip(SEEDS, of_seeds):
            assert torch.equal(losses, ours), (seed, losses, ours)
            assert all(torch.equal(a, b) for a, b in zip(values, own)), seed


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("stage 3", "hpZ")])
def test_bits_are_those_of_the_cpu(name, tmp_path):
    equal(run_ranks(CASES[name][0], on_cpu, name, init=True, timeout=200), found_on_standin(name, tmp_path))


def test_a_second_copy_changes_no_bit(tmp_path):
    """NCCL adds up in another order than the CPU, so the measure is stage 3 on the same device."""
    expected = [of_seeds[0] for of_seeds in found_on_standin("stage 3", tmp_path)]
    equal(expected, found_on_standin("hpZ", tmp_path))
