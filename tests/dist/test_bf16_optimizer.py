"""``BF16_Optimizer``: made by the engine, and by hand in a training loop of the user's."""

import copy
import functools
import os

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.config import DeepSpeedConfig
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from harness import on_ranks
from models import seeded
from plain import Plain
from refusals import refused
from runs import load_into, take_step
from zero_training import Deep, loss_on, start

STEPS, MICRO, LR = 3, 2, 1e-2
CONFIG = {"train_batch_size": 12, "bf16": {"enabled": True}}


def reference(world):
    """bf16 gradients of every rank and micro-batch, summed in fp32 and averaged over ranks; Adam on fp32 masters."""
    plain = Plain(seeded(Deep), functools.partial(torch.optim.Adam, lr=LR), torch.bfloat16, clip=0.5)
    for step in range(STEPS):
        for part in range(world * MICRO):
            plain.add(loss_on(plain.model, step, part))
        plain.update({name: grad / world for name, grad in plain.sums().items()})
    return plain.masters.values()


@pytest.mark.parametrize("world, adam", [(1, "torch"), (2, "ours")])
@on_ranks(init=True)
def test_made_by_hand(rank, world, adam):
    model = seeded(Deep).bfloat16()
    inner = (deepspeed.ops.adam.FusedAdam if adam == "ours" else torch.optim.Adam)(model.parameters(), lr=LR)
    names = {param: name for name, param in model.named_parameters()}
    section = DeepSpeedConfig(copy.deepcopy(CONFIG), world_size=1).bfloat16_config
    group = dist.get_world_group() if world > 1 else None
    optimizer = BF16_Optimizer(inner, names, section, clip_grad=0.5, dp_process_group=group)
    assert isinstance(optimizer, ZeROOptimizer) and optimizer.bf16_groups[0] == list(model.parameters())
    assert optimizer.param_names[model.extra] == "extra" and optimizer.param_groups is inner.param_groups
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            loss_on(model, step, world * micro + rank).backward()
            assert model.extra.grad.dtype == torch.bfloat16
            if micro == 0 and step == 0:
                optimizer.accumulate_hp_grads_and_remove_lp(model.extra, 0, 0)
                assert model.extra.grad is None and model.head.weight.grad is not None
            optimizer.update_hp_grads(clear_lp_grads=False)
            optimizer.clear_lp_grads()
        if step == 0:
            optimizer.reduce_gradients()
            grads, of_experts = optimizer.get_grads_for_reduction()
            assert of_experts == {} and grads and all(grad.dtype == torch.float32 for grad in grads)
            assert len(optimizer.get_grads_for_norm(for_clipping=True)[0]) == len(grads)
        optimizer.step()
    masters = reference(world)
    for param, master in zip(model.parameters(), masters):
        found = param._ds_link.get("fp32")
        assert torch.allclose(found, master, rtol=1e-5, atol=2e-6), float((found - master).abs().max())
        assert torch.equal(param.detach(), found.bfloat16())
    # A loop of the user's that does not call it at all: .grad counts in the step.
    before = model.head.weight.detach().clone()
    loss_on(model, 9, rank).backward()
    optimizer.clear_hp_grads()
    assert model.head.weight.grad is not None
    optimizer.step()
    assert not torch.equal(before, model.head.weight.detach())
    state = optimizer.state_dict()
    assert {"clip_grad", "base_optimizer_state", "single_partition_of_fp32_groups", "group_paddings",
            "partition_count", "ds_version", "param_slice_mappings"} <= set(state)  # fmt: skip
    if world == 1:
        before = optimizer.single_partition_of_fp32_groups[0]
        for group in optimizer.fp32_groups:
            for master in group:
                master.data.zero_()
        optimizer.load_state_dict([state], None, True, True)
        assert torch.equal(optimizer.single_partition_of_fp32_groups[0], before) and float(before.abs().sum()) > 0


@on_ranks(2)
def test_made_by_the_engine(rank, world, folder):
    more = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    engine = start(seeded(Deep), 1, world, MICRO, **copy.deepcopy(more))
    assert type(engine.optimizer) is BF16_Optimizer
    for micro in range(2 * MICRO):
        take_step(engine, loss_on(engine, 0, world * micro + rank))
    engine.save_checkpoint(folder, tag="one")
    assert os.path.exists(f"{folder}/one/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    again = load_into(start(seeded(Deep), 1, world, MICRO, **more), folder, tag="one")
    for mine, theirs in zip(engine.optimizer.single_partition_of_fp32_groups,
                            again.optimizer.single_partition_of_fp32_groups):  # fmt: skip
        assert torch.equal(mine, theirs)
    for stage, grad in ((2, "fp32"), (1, None)):
        other = start(seeded(Deep), stage, world, bf16={"enabled": True}, data_types={"grad_accum_dtype": grad})
        assert not isinstance(other.optimizer, BF16_Optimizer)


@pytest.mark.parametrize("args, text", [({"norm_type": 1}, "norm_type 1"), ({}, "is fp16")])
def test_bad_input(args, text):
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.float16 if not args else torch.bfloat16))
    refused((NotImplementedError, ValueError), text, BF16_Optimizer, torch.optim.SGD([param], lr=1), {}, None, **args)


def test_graph_harvesting_changes_nothing():
    found = []
    for harvesting in (False, True):
        param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        made = BF16_Optimizer(torch.optim.SGD([param], lr=0.5), {}, None, graph_harvesting=harvesting)
        (param.float() * torch.arange(3)).sum().backward()
        made.step()
        found.append(param.tolist())
    assert found[0] == found[1] != [1.0] * 3
