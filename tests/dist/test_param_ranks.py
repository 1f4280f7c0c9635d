"""Parameters with ranks of their own (``ds_ranks``): each expert lives on every second rank. The measure is one process
with all experts and the whole batch."""

import functools

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm import mesh
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param
from deepspeed.zero.parameters.param_ranks import ParamRanks
from harness import on_ranks
from models import Parts
from plain import Plain
from runs import engine_of, take_step

EXPERTS, WIDTH, STEPS, LR = 2, 6, 3, 0.05


def values(seed, *shape):
    return torch.sin(torch.arange(int(torch.tensor(shape).prod()), dtype=torch.float32) * 0.7 + seed).reshape(shape)


def layer_of(experts):
    """A dense layer, and one expert (or all of them: the measure)."""
    net = Parts(
        lambda net, x, expert: torch.tanh(net.experts[expert](torch.tanh(net.dense(x)))),
        dense=torch.nn.Linear(WIDTH, WIDTH),
        experts=torch.nn.ModuleDict({str(e): torch.nn.Linear(WIDTH, WIDTH) for e in experts}),
    )
    with torch.no_grad():
        for seed, linear in [(50, net.dense), *((int(e), linear) for e, linear in net.experts.items())]:
            linear.weight.copy_(values(seed, WIDTH, WIDTH))
            linear.bias.copy_(values(seed + 20, WIDTH))
    return net


def batch(step, rank):
    return values(100 * step + rank, 4, WIDTH)


def measure(world):
    """One process after the same training."""
    adamw = functools.partial(torch.optim.AdamW, lr=LR, weight_decay=0.1)
    plain = Plain(layer_of(range(EXPERTS)), adamw, dtype=None, clip=0.1)
    return plain.run(
        lambda model, step, rank: model(batch(step, rank), str(rank % EXPERTS)).square().mean(), range(STEPS), world
    )


@pytest.mark.sample("values")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 4])
@on_ranks(init=True)
def test_experts_equal_one_process(rank, world, stage, folder):
    expert = rank % EXPERTS
    groups = {
        "edp": mesh.group_over(list(range(expert, world, EXPERTS))),
        "ep": mesh.group_over([rank - expert + e for e in range(EXPERTS)]),
    }
    model = layer_of([expert])
    if rank >= EXPERTS:  # what the first holder has counts
        model.experts[str(expert)].bias.data.zero_()
    for param in model.experts.parameters():
        param.ds_ranks = ParamRanks("experts", groups, groups["edp"])
    config = {
        "train_batch_size": 4 * world,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.1,
    }
    engine = engine_of(model, config)
    norms = []
    for step in range(STEPS):
        take_step(engine, engine(batch(step, rank), str(expert)).square().mean())
        norms.append(float(engine.get_global_grad_norm()))
    mine = dict(model.named_parameters())
    found = {name: safe_get_full_fp32_param(param) for name, param in mine.items()}
    weight = mine[f"experts.{expert}.weight"]
    assert safe_get_full_optimizer_state(weight, "exp_avg").shape == (WIDTH, WIDTH)
    engine.save_checkpoint(folder)
    safe_set_full_fp32_param(weight, torch.full((WIDTH, WIDTH), float(expert)))
    assert torch.equal(safe_get_full_fp32_param(weight), torch.full((WIDTH, WIDTH), float(expert)))
    with deepspeed.zero.GatheredParameters([weight], enabled=stage == 3):
        assert torch.equal(weight.detach(), torch.full((WIDTH, WIDTH), float(expert)))
    engine.load_checkpoint(folder)
    assert all(torch.equal(safe_get_full_fp32_param(param), found[name]) for name, param in mine.items())
    dist.barrier()
    expected = measure(world)
    assert norms == pytest.approx(expected.norms, rel=1e-4)
    for name, value in found.items():
        torch.testing.assert_close(value, expected.params[name].detach(), rtol=1e-4, atol=1e-5)
