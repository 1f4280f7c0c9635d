"""Layers with experts on several ranks against plain loops in one process: losses, norms, parameters."""

import pytest
import torch

from deepspeed.utils import safe_get_full_fp32_param
from engine_models import losses_and_norms
from harness import on_ranks
from moe_models import ADAM, batch, moe_net, plain_name, plain_net, plain_run
from runs import engine_of, settings

EXPERTS, STEPS = 8, 3


def config(world, stage, offload=None, folder=""):
    device = {} if offload is None else {"device": offload, **({"nvme_path": folder} if offload == "nvme" else {})}
    places = {"offload_optimizer": device, **({"offload_param": device} if stage == 3 else {})} if device else {}
    return settings(stage, 8, optimizer={"type": "AdamW", "params": ADAM}, zero=places, gradient_clipping=0.3)


def assert_like_loops(rank, world, stage, ep_size, k, drop, residual, steps=STEPS, *places):
    net = moe_net(rank % ep_size, EXPERTS, ep_size, k, drop, residual)
    engine = engine_of(net, config(world, stage, *places))
    own_losses, own_norms = losses_and_norms(engine, (batch(step, rank) for step in range(steps)))
    plain = plain_run(plain_net(EXPERTS, k, drop, residual), world, steps)
    assert own_losses == pytest.approx([step[rank] for step in plain.losses], abs=2e-6)
    assert own_norms == pytest.approx(plain.norms, rel=1e-5)
    first = rank % ep_size * net.layer.num_local_experts
    for name, param in net.named_parameters():
        expected = plain.params[plain_name(name, first)].detach()
        assert torch.allclose(safe_get_full_fp32_param(param).cpu(), expected, rtol=1e-5, atol=2e-6), name


@pytest.mark.any_device
@pytest.mark.sample("values", 6)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world, ep_size", [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
@on_ranks(init=True)
def test_equals_loops_in_one_process(rank, world, ep_size, stage, k, drop, residual):
    assert_like_loops(rank, world, stage, ep_size, k, drop, residual)


@pytest.mark.any_device
@pytest.mark.parametrize(
    "stage, ep_size, drop, offload",
    [(1, 2, True, "cpu"), (2, 1, False, "cpu"), (3, 1, True, "cpu"), (3, 2, False, "nvme")],
)
@on_ranks(2, init=True)
def test_states_and_weights_rest_elsewhere(rank, world, stage, ep_size, drop, offload, folder):
    assert_like_loops(rank, world, stage, ep_size, 2, drop, False, STEPS, offload, folder)


@pytest.mark.every("eight ranks and ten steps of what fewer do, too")
@pytest.mark.parametrize(
    "ep_size, stage, k, drop, residual", [(8, 3, 2, False, True), (4, 2, 4, True, False), (2, 0, 1, False, False)]
)
@on_ranks(8, init=True)
def test_eight_ranks_ten_steps(rank, world, ep_size, stage, k, drop, residual):
    assert_like_loops(rank, world, stage, ep_size, k, drop, residual, 10)


@pytest.mark.parametrize("chunks", [1, 2])
@on_ranks(2, init=True)
def test_ranks_may_bring_different_numbers_of_tokens(rank, world, chunks):
    """Outputs and their gradients beside those of a layer with all experts."""
    shared, whole = (moe_net(rank % size, 4, size, 2, True, False, 2.0).layer for size in (world, 1))
    for layer in (shared, whole):
        layer.set_deepspeed_parallelism()
        layer.deepspeed_moe.overlap_chunks = chunks
    tokens, found = batch(0, rank, 3 + 2 * rank), []
    for layer in (shared, whole):
        given = tokens.clone().requires_grad_()
        out = layer(given)[0]
        out.square().sum().backward()
        found += [out.detach(), given.grad]
    assert max((a - b).abs().max().item() for a, b in zip(found[:2], found[2:], strict=True)) < 1e-6
