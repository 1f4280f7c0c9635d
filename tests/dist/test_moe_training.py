"""Training with experts beyond one plain layer: kinds of layers, layers used twice, recomputation, overflow, clients'
groups, statistics, balance, what goes wrong between ranks."""

import pytest
import torch

import deepspeed
import devices
from deepspeed import comm as dist
from deepspeed.moe.statistics import LayerStatistics
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from engine_models import losses_and_norms
from harness import on_ranks, run_ranks
from models import Parts, Recomputed, beside, seeded
from moe_models import (
    ADAM,
    WIDTH,
    Loops,
    batch,
    fill,
    fill_net,
    moe_layer,
    moe_net,
    net_of,
    plain_name,
    plain_net,
    plain_run,
    values,
)
from mpu import two_by_two
from refusals import refused
from runs import engine_of, settings, take_step, together


def config(world, stage=0, **more):
    accumulate = more.pop("gradient_accumulation_steps", 1)
    more = {"train_batch_size": 8 * world * accumulate, "gradient_clipping": 0.3, **more}
    return settings(stage, None, accumulate, optimizer={"type": "AdamW", "params": ADAM}, **more)


def train(engine, rank, steps=3, micro=1):
    return [take_step(engine, engine(batch(number, rank))) for number in range(steps * micro)]


def check_params(net, first_of, expected):
    for name, value in found(net, first_of).items():
        assert torch.allclose(torch.tensor(value), expected.params[name], rtol=1e-4, atol=5e-6), name


def found(net, first_of):
    """Parameters by the names that ``Loops`` has for them. ``first_of(name)``: the first expert here."""
    return {plain_name(n, first_of(n)): safe_get_full_fp32_param(p).tolist() for n, p in net.named_parameters()}


def forward_pyramid_of(net, x):
    x, loss = beside(net.last.weight, x), 0
    for layer in (net.small, net.large, net.large):
        out, aux, _ = layer(x)
        x, loss = x + out, loss + 0.05 * aux
    return net.last(x).square().mean() + loss


def pyramid_of(small, large):
    """Two layers with experts: 2 on two ranks, then 4 on four, with a dense expert beside them, used twice."""
    return Parts(
        forward_pyramid_of,
        small=small,
        large=large,
        last=torch.nn.Linear(WIDTH, 1),
    )


def pyramid(ranks_first):
    """``ranks_first``: None for the one in plain loops, else the first experts of both layers on this rank."""
    if ranks_first is None:
        net = pyramid_of(Loops(2, 1, False, False, 1.0), Loops(4, 2, True, True, 1.0))
        parts = [(layer.wg, dict(enumerate(layer.experts))) for layer in (net.small, net.large)]
    else:
        net = pyramid_of(moe_layer(2, 2, 1, False, False, 1.0), moe_layer(4, 4, 2, True, True, 1.0))
        moes = [layer.deepspeed_moe for layer in (net.small, net.large)]
        parts = [
            (m.gate.wg, {first: m.experts.deepspeed_experts[0]}) for m, first in zip(moes, ranks_first, strict=True)
        ]
    for wg, experts in parts:
        fill(wg, 5)
        for number, one in experts.items():
            fill(one, 1000 * (number + 1))
    for seed, module in enumerate([net.large.mlp, net.large.coefficient, net.last]):
        fill(module, 40 + seed)
    return net


@pytest.mark.any_device
@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(4, init=True)
def test_layers_may_differ_and_be_used_twice(rank, world, stage):
    expected = plain_run(pyramid(None), world, 3)
    first = {"small": rank % 2, "large": rank}
    net = pyramid(list(first.values()))
    engine = engine_of(net, config(world, stage))
    assert engine.has_moe_layers and engine.num_experts == [2, 4]
    assert train(engine, rank) == pytest.approx([step[rank] for step in expected.losses], abs=3e-6)
    check_params(net, lambda name: first.get(name.split(".")[0], 0), expected)


def counted(function, calls):
    def counting(*args):
        calls.append(function)
        return function(*args)

    return counting


def variant_body(rank, world, how, drop):
    """Losses and parameters of this rank, trained in some way that changes nothing."""
    net = moe_net(rank % 2, 4, 2, 2, drop, True, 1.0)
    settings, optimizer = config(world, 1), None
    if how == "chunks":
        settings["moe"] = {"overlap_chunks": 2}
    elif how in ("reentrant", "saved"):
        net.layer = Recomputed(lambda layer=net.layer: layer, 1, how == "reentrant")
    elif how == "groups":
        groups = split_params_into_different_moe_groups_for_optimizer({"params": list(net.parameters()), "name": "all"})
        assert [group.get("name") for group in groups] == ["all", "ep_size_2"]
        optimizer = torch.optim.AdamW(groups, **ADAM)
        del settings["optimizer"]
    engine = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)[0]
    begun = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerStatistics, "see_seconds", counted(LayerStatistics.see_seconds, begun))
        losses = train(engine, rank)
    if how in ("plain", "chunks"):  # steps x ways, forth and back
        assert len(begun) == 3 * 4 * (2 if how == "chunks" else 0 if drop else 1)
    if how == "groups":
        marked = [engine.optimizer.is_moe_group(group) for group in engine.optimizer.param_groups]
        assert marked == [False, True] and engine.optimizer.get_ep_ranks(rank, "ep_size_2") == [rank]
    engine.print_forward_breakdown(1.0)
    assert [figures["tokens"] for figures in engine.moe_statistics().values()] == [8 * world]
    return losses, [safe_get_full_fp32_param(p).tolist() for p in net.parameters()]


@pytest.mark.any_device
@pytest.mark.parametrize("drop", [False, True])
def test_ways_of_training_that_change_nothing(drop):
    plain = run_ranks(2, variant_body, "plain", drop, init=True)
    ways = ["reentrant", "saved", "groups"]
    if devices.NAME == "cpu":
        assert run_ranks(2, variant_body, "chunks", drop, init=True) == plain
    else:  # products of devices are torch's, whose last bits may depend on where the rows lie
        ways.append("chunks")
    for how in ways:
        for mine, own in zip(plain, run_ranks(2, variant_body, how, drop, init=True), strict=True):
            assert own[0] == pytest.approx(mine[0], abs=1e-6), how
            for a, b in zip(mine[1], own[1], strict=True):
                assert torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-5, atol=1e-6), how


HALF = {"fp16": {"enabled": True, "hysteresis": 1}, "bf16": {"enabled": True, "check_grad_overflow": True}}
FP16 = pytest.mark.skipif(not deepspeed.get_accelerator().is_fp16_supported(), reason="no fp16 on this device")


@pytest.mark.any_device
@pytest.mark.parametrize("kind", ["bf16", pytest.param("fp16", marks=FP16)])
@on_ranks(2, init=True)
def test_overflow_in_one_expert_skips_all(rank, world, kind):
    net = moe_net(rank, 4, 2, 1, False, False)
    engine = engine_of(net, config(world, 2, **{kind: HALF[kind]}))
    if rank == 1:
        experts = net.layer.deepspeed_moe.experts.deepspeed_experts
        experts[0][0].weight.register_hook(lambda grad: grad * float("inf"))
    before = [safe_get_full_fp32_param(p).clone() for p in net.parameters()]
    scale = engine.loss_scale()
    take_step(engine, engine(batch(0, rank).to(torch.float16 if kind == "fp16" else torch.bfloat16)).float())
    assert not engine.was_step_applied() and engine.skipped_steps == 1
    assert engine.loss_scale() < scale or kind == "bf16"
    assert all(torch.equal(a, safe_get_full_fp32_param(p)) for a, p in zip(before, net.parameters(), strict=True))


@pytest.mark.any_device
@pytest.mark.parametrize("kind, stage", [("bf16", 1), ("bf16", 3), pytest.param("fp16", 2, marks=FP16)])
@on_ranks(2, init=True)
def test_half_precision_with_accumulation_learns(rank, world, kind, stage):
    net = moe_net(rank, 4, 2, 2, False, True)
    more = {"gradient_accumulation_steps": 2, kind: {"enabled": True}}
    engine = engine_of(net, config(world, stage, **more))
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    losses = [take_step(engine, engine(batch(0, rank).to(dtype)).float()) for _ in range(8)]
    assert losses[0] == losses[1] and losses[-1] < losses[0]


@pytest.mark.parametrize("drop", [False, True])
@on_ranks(2, init=True)
def test_statistics(rank, world, drop):
    net = moe_net(rank, 8, 2, 2, drop, False, 1.0)
    engine = engine_of(net, config(world))
    assert engine.moe_statistics() == {}
    train(engine, rank, steps=1)
    counts = net.counts
    engine.eval()
    engine(batch(0, rank))
    figures = engine.moe_statistics()
    assert list(figures) == ["layer"]
    (figures, first), (other, second) = together(figures["layer"], counts.tolist())
    counts = [a + b for a, b in zip(first, second, strict=True)]
    assert figures == other | {"exchange_ms": figures["exchange_ms"]} and figures["tokens_per_expert"] == counts
    assert figures["tokens"] == 16 and 0 < figures["router_entropy"] < 2.1
    assert figures["busiest_over_mean"] == pytest.approx(max(counts) * 8 / 32)
    if drop:  # both ways and back, 4 experts of the other rank, capacity 2, on each of 2 ranks
        assert figures["exchange_bytes"] == 4 * 4 * 2 * WIDTH * 4 * 2 and figures["dropped_share"] > 0
    else:
        crossing = sum(first[4:]) + sum(second[:4])
        assert figures["dropped_share"] == 0 and figures["exchange_bytes"] == 4 * crossing * WIDTH * 4 + 2 * 4 * 8
        assert figures["exchange_ms"] > 0


@on_ranks(2, init=True)
def test_a_bias_balances_experts(rank, world):
    layer = seeded(moe_layer, 4, 2, 1, False, False, balance="bias", seed=1)
    net = net_of(layer)
    gate = layer.deepspeed_moe.gate
    fill_net(net, gate.wg, {}, None, None)
    with torch.no_grad():
        gate.wg.weight.mul_(0.3)
        gate.wg.weight[0, 0] += 2.0
    engine = engine_of(net, config(world, moe={"bias_update_rate": 0.05, "idle_steps": 2}))
    shares = []
    for step in range(30):
        take_step(engine, engine(batch(step, rank)))
        shares.append(engine.moe_statistics()["layer"]["busiest_over_mean"])
    assert float(layer.deepspeed_moe.l_aux) == 0
    (shares, bias), other = together(shares, gate.expert_bias.tolist())
    assert other == (shares, bias) or list(other) == [shares, bias]
    assert shares[0] == 4 and max(shares[-8:]) < 3 and bias[0] < min(bias[1:])


@on_ranks(2, init=True)
def test_the_loss_may_look_at_all_ranks_tokens(rank, world):
    nets = {scope: moe_layer(4, 1, 2, False, False, aux_scope=scope) for scope in ("rank", "batch")}
    losses = {}
    for scope, layer in nets.items():
        fill(layer, 3)
        layer.set_deepspeed_parallelism()
        losses[scope] = layer(batch(0, rank))[1].item()
    whole = moe_layer(4, 1, 2, False, False)
    fill(whole, 3)
    everything = whole(torch.cat([batch(0, r) for r in range(world)]))[1].item()
    results = together(losses["batch"], everything)
    assert (sum(found for found, _ in results) / 2) == pytest.approx(results[0][1], rel=1e-6)


@on_ranks(2, init=True)
def test_a_rank_that_skips_a_layer_is_named_with_it(rank, world):
    engine = engine_of(moe_net(rank, 4, 2, 1, False, False), config(world, comm={"timeout": 3}))
    if rank == 0:
        refused(RuntimeError, "(?s)^MoE layer 'layer': .*rank 1", engine, batch(0, rank))


@on_ranks(2, init=True)
def test_ranks_with_all_experts_need_nobody(rank, world):
    """Without others' experts there is no collective: ranks may run different numbers of forwards."""
    engine = engine_of(moe_net(0, 4, 1, 2, False, False), config(world))
    engine.eval()
    for step in range(3 * rank):
        engine(batch(step, rank))
    dist.barrier()


@on_ranks(2, init=True)
def test_more_ranks_for_experts_than_there_are(rank, world):
    refused(
        ValueError,
        r"MoE layer 'layer' shares its 8 experts among ep_size=4 ranks; this job has 2",
        deepspeed.initialize,
        model=net_of(moe_layer(8, 4, 1, False, False)),
        config=config(world),
    )


@on_ranks(2, init=True)
def test_a_tokens_output_is_its_own(rank, world):
    """The output of a token, whatever the other rank's tokens are."""
    net = moe_net(rank, 4, 2, 2, False, True)
    net.layer.set_deepspeed_parallelism()
    inputs = (batch(0, 0) if rank == 0 else values(seed, 5 * seed, WIDTH) for seed in range(4))
    first, *others = (net.layer(x)[0] for x in inputs)
    assert rank != 0 or all(torch.allclose(first, other, rtol=0, atol=1e-6) for other in others)


@pytest.mark.any_device
@pytest.mark.parametrize("given", ["optimizer", "list"])
@on_ranks(4, init=True)
def test_experts_in_zero_init(rank, world, given):
    """Built where nobody knows yet who shares which experts."""
    settings, more = config(world, 3), {}
    with deepspeed.zero.Init(config_dict_or_path=settings):
        net = net_of(moe_layer(4, 2, 1, False, False))
    if given == "optimizer":
        del settings["optimizer"]
        more = {"optimizer": torch.optim.AdamW(net.parameters(), **ADAM)}
    elif given == "list":
        more = {"model_parameters": list(net.parameters())}
    engine = deepspeed.initialize(model=net, config=settings, **more)[0]
    plain = dict(plain_net(4, 1, False, False).named_parameters())
    first = 2 * (rank % 2)
    for name, param in net.named_parameters():
        safe_set_full_fp32_param(param, plain[plain_name(name, first)].detach())
    expected = plain_run(plain_net(4, 1, False, False), 4, 3)
    assert train(engine, rank) == pytest.approx([step[rank] for step in expected.losses], abs=3e-6)
    check_params(net, lambda name: first, expected)


@on_ranks(4, init=True)
def test_tensor_parallel_ranks_share_the_work_on_their_tokens(rank, world):
    """Ranks 0, 1 and 2, 3 have the same tokens each; experts are spread over all four."""
    unit = two_by_two(rank)
    for ep_size, drop, stage in ((2, False, 0), (4, True, 2), (4, False, 1)):
        net = moe_net(rank % ep_size, 4, ep_size, 2, drop, True, 1.0)
        engine = engine_of(net, config(world, stage, train_batch_size=16), mpu=unit)
        own_losses, own_norms = losses_and_norms(engine, (batch(step, rank // 2) for step in range(3)))
        expected = plain_run(plain_net(4, 2, drop, True, 1.0), 2, 3)
        assert own_losses == pytest.approx([step[rank // 2] for step in expected.losses], abs=3e-6)
        assert own_norms == pytest.approx(expected.norms, rel=1e-5)
        first = rank % ep_size * net.layer.num_local_experts
        check_params(net, lambda name, first=first: first, expected)
        engine.destroy()


def saved_body(rank, world, ep_size, stage, folder, loads):
    net = moe_net(rank % ep_size, 4, ep_size, 2, False, True, 1.0)
    engine = engine_of(net, config(world, stage, train_batch_size=16))
    first = rank % ep_size * net.layer.num_local_experts
    if loads:
        engine.load_checkpoint(folder)
    else:
        train(engine, rank, steps=2)
        engine.save_checkpoint(folder)
    before = found(net, lambda name: first)
    for step in range(2, 4):  # 16 tokens, however many ranks
        take_step(engine, engine(batch(step, 0, 16)[rank * (16 // world) :][: 16 // world]))
    return before, found(net, lambda name: first)


@pytest.mark.any_device
@pytest.mark.sample("values")
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("world, ep_size", [(1, 1), (2, 1), (2, 2), (4, 4), (4, 2)])
def test_checkpoints_load_at_any_degree(world, ep_size, stage, tmp_path):
    """The gate's loss looks at the tokens of a rank: what follows differs by that, the states do not."""
    everything, after = {}, {}
    for before, trained in run_ranks(2, saved_body, 2, stage, str(tmp_path), False, init=True):
        everything.update(before)
        after.update(trained)
    for before, trained in run_ranks(world, saved_body, ep_size, stage, str(tmp_path), True, init=True):
        for name, value in before.items():
            assert value == everything[name], name
        if (world, ep_size) == (2, 2):
            assert all(value == after[name] for name, value in trained.items())
