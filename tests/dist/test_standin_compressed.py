"""1-bit optimizers, ZeRO++ and MixZ++ on the stand-in device with the CUDA kernels and its NCCL: the bits of the CPU
for every seed and in both modes, and no access without an order."""

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
        return self.out(torch.relu(self.inner(torch.relu(self.first(x)))))


# name: (ranks, stage, settings, keys of zero_optimization, whether a layer is frozen)
CASES = {
    **{kind: (2, 0, {"optimizer": section(kind), "gradient_clipping": 1.0}, {}, False) for kind in sorted(KINDS)},
    "ZeRO++": (4, 3, {}, ZEROPP, False),
    "LoCo": (4, 2, {}, {"zero_quantized_gradients": True, "zeropp_loco_param": {}}, False),
    "MixZ++": (2, 3, {}, {"zero_quantized_nontrainable_weights": True}, True),
}


def trained(rank, name):
    """The losses and the weights of a run, on the host."""
    _, stage, given, zero, frozen = CASES[name]
    made = settings(stage, rows=4, dtype="bf16", zero={**SMALL, **zero} if stage else {}, **given)
    engine = engine_of(seeded(Net, frozen), made)
    losses = []
    for step in range(STEPS):
        drawn = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(4, 12, generator=drawn).to(engine.device, torch.bfloat16)
        losses.append(take_step(engine, (engine(x) - x[:, :4]).float().square().mean()))
    found = [one.float().cpu() for one in weights(engine).values()]
    engine.destroy()
    return torch.tensor(losses), found


def on_cpu(rank, world, name):
    os.environ["DS_HOST_ID"] = "aabb"[rank]
    return trained(rank, name)


def on_standin(rank, world, name):
    os.environ["DS_HOST_ID"] = "aabb"[rank]
    deepspeed.accelerator.set_accelerator(standin.Standin_Accelerator())
    found = []
    for seed in SEEDS:
        standin.choose(seed, lazy=seed % 2 == 1)
        found.append(trained(rank, name))
        assert standin.faults_at_end() == []
    return found


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_the_cpu(name, tmp_path):
    world = CASES[name][0]
    env = {"DS_STANDIN_KERNELS": standin_kernels.library_path(), "DS_STANDIN_NCCL": fake_nccl.build(tmp_path)}
    expected = run_ranks(world, on_cpu, name, init=True, timeout=200)
    found = run_ranks(world, on_standin, name, init=True, fresh=True, env=env, timeout=400)
    for (losses, values), of_seeds in zip(expected, found):
        for seed, (ours, own) in zip(SEEDS, of_seeds):
            assert torch.equal(losses, ours), (seed, losses, ours)
            assert all(torch.equal(a, b) for a, b in zip(values, own)), seed
