"""qgZ: gradients that travel as blocks of integers. Ranks believe that they are on several hosts."""

import os

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_grad
from harness import on_ranks
from refusals import refused
from runs import engine_of, settings, take_step, together, weights

WIDTH, ROWS = 48, 4
QGZ = {"zero_quantized_gradients": True, "reduce_bucket_size": 3000}
# (hosts of the ranks, bits of the exchanges)
HOSTS = [("aaaa", (8,)), ("aabb", (8, 4)), ("abab", (8, 4)), ("aaab", (8,)), ("abcd", (4,))]


def make_net(width=WIDTH):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 3))


def batch(step, rank, width=WIDTH):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(ROWS, width, generator=generator)
    return x, x[:, :3].sin()


def loss_of(net, step, rank, dtype=torch.float32, width=WIDTH):
    x, y = (one.to(getattr(net, "device", "cpu")) for one in batch(step, rank, width))
    return torch.nn.functional.mse_loss(net(x.to(dtype)).float(), y)


def engine_on(hosts, rank, stage, dtype="fp32", zero=(), rate=0.01, width=WIDTH, **more):
    os.environ["DS_HOST_ID"] = hosts[rank]
    return engine_of(make_net(width), settings(stage, ROWS, dtype=dtype, rate=rate, zero={**QGZ, **dict(zero)}, **more))


def grads_of(engine):
    return {name: safe_get_full_grad(param).float().cpu() for name, param in engine.module.named_parameters()}


def bound_of(local, bits):
    """The largest error of a mean over ranks whose largest gradient is ``local``: half a scale for each exchange."""
    lost = sum(0.51 * local / (2 ** (one - 1) - 1) for one in bits)
    return lost * (1.1 if len(bits) > 1 else 1.0) + 1e-6


@pytest.mark.any_device
@pytest.mark.parametrize("hosts, bits", HOSTS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(4)
def test_gradients_are_off_by_half_a_scale_at_most(rank, world, stage, hosts, bits):
    for accumulate in (1, 2):
        more = {"gradient_accumulation_steps": accumulate}
        engine = engine_on(hosts, rank, stage, **more)
        net = make_net()
        for micro in range(accumulate):
            loss = loss_of(engine, micro, rank)
            engine.backward(loss)
            (loss_of(net, micro, rank) / accumulate).backward()
            if micro + 1 < accumulate:
                engine.step()
        local = together({name: param.grad for name, param in net.named_parameters()})
        largest = max(grad.abs().max().item() for of_rank in local for grad in of_rank.values())
        bound = bound_of(largest, bits) * (accumulate if stage > 1 else 1)
        differences = 0.0
        for name, got in grads_of(engine).items():
            want = sum(of_rank[name] for of_rank in local) / world
            difference = (got - want).abs().max().item()
            assert difference <= bound, (name, difference, bound)
            differences += difference
        assert differences > bound / 1000  # they have travelled as codes
        engine.step()
        engine.destroy()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(4)
def test_training_learns_as_much(rank, world, stage, dtype):
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    ends = []
    for zero in ({"zero_quantized_gradients": False}, {}):
        engine = engine_on("aabb", rank, stage, dtype, zero)
        losses = [take_step(engine, loss_of(engine, step % 8, rank, kind)) for step in range(60)]
        ends.append(sum(sum(one[-8:]) for one in together(losses)))
        values = torch.cat([one.float().flatten() for one in weights(engine).values()])
        assert all(torch.equal(values, other) for other in together(values))  # the same bits everywhere
        engine.destroy()
    assert ends[1] <= 1.03 * ends[0]


VARIANTS = {
    "offload": dict(stage=2, zero={"offload_optimizer": {"device": "cpu"}}),
    "offload of stage 3": dict(stage=3, zero={"offload_optimizer": {"device": "cpu"}}),
    "no overlap": dict(stage=2, zero={"overlap_comm": False}),
    "all-reduce": dict(stage=2, zero={"reduce_scatter": False}),
    "in bf16": dict(stage=2, communication_data_type="bf16"),
    "prescaled": dict(stage=2, prescale_gradients=True, gradient_predivide_factor=2.0),
    "MiCS": dict(stage=3, zero={"mics_shard_size": 2}),
}


@pytest.mark.parametrize("name", VARIANTS)
@on_ranks(4)
def test_with_other_settings(rank, world, name):
    variant = dict(VARIANTS[name])
    zero = variant.pop("zero", {})
    losses = []
    for blocks in (False, True):
        engine = engine_on("aabb", rank, zero={**zero, "zero_quantized_gradients": blocks}, **variant)
        losses.append(sum(together([take_step(engine, loss_of(engine, step % 4, rank)) for step in range(20)])[0][-4:]))
        engine.destroy()
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@on_ranks(4)
def test_fewer_bytes_go_between_hosts(rank, world):
    sent = []
    for zero in ({"zero_quantized_gradients": False}, {}):
        made = {"comms_logger": {"enabled": True}, "communication_data_type": "fp16"}
        engine = engine_on("aabb", rank, 2, zero={**zero, "reduce_bucket_size": 10**6}, width=256, **made)
        dist.reset_log()
        engine.backward(loss_of(engine, 0, rank, width=256))
        found = dist.log_summary(return_dict=True)["summary"]
        sent.append({verb: sum(size * row["count"] for size, row in found.get(verb, {}).items())
                     for verb in ("all_to_all", "reduce_scatter")})  # fmt: skip
        engine.destroy()
    numel = sum(param.numel() for param in make_net(256).parameters())
    assert sent[0]["reduce_scatter"] >= 2 * numel and sent[0]["all_to_all"] == 0
    # 8 bits of all rows to the rank of this host, then 4 bits of a row to that of the other one.
    expected = numel * (1 + 2 / 256) + numel / 2 * (0.5 + 2 / 256)
    assert sent[1]["all_to_all"] == pytest.approx(expected, rel=0.01) and sent[1]["reduce_scatter"] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("hosts", ["aaaa", "aabb"])
@on_ranks(4)
def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(rank, world, hosts, bad):
    engine = engine_on(hosts, rank, 2, "bf16", bf16={"enabled": True, "check_grad_overflow": True})
    before = weights(engine)
    loss = loss_of(engine, 0, rank, torch.bfloat16)
    if rank == 2:
        loss = loss * bad
    take_step(engine, loss)
    assert engine.skipped_steps == 1
    assert all(torch.equal(before[name], now) for name, now in weights(engine).items())
    take_step(engine, loss_of(engine, 0, rank, torch.bfloat16))
    assert engine.skipped_steps == 1
    assert all(one.isfinite().all() for one in weights(engine).values())


# ---- LoCo ---------------------------------------------------------------------------------------------------------
LOCO = {"zeropp_loco_param": {"err_beta": 0.0, "reset_T": 6}}


def mean_of_gradients(rank, zero, steps=6, between=None):
    """The mean over steps of the gradients of one batch, at weights that do not change."""
    engine = engine_on("aabb", rank, 2, zero=zero, rate=0.0)
    total = {}
    for step in range(steps):
        engine.backward(loss_of(engine, 0, rank))
        for name, grad in grads_of(engine).items():
            total[name] = total.get(name, 0) + grad / steps
        engine.step()
        if between is not None:
            between(engine, step)
    engine.destroy()
    return total


@on_ranks(4)
def test_errors_are_fed_back_and_forgotten(rank, world):
    exact = mean_of_gradients(rank, {"zero_quantized_gradients": False}, 1)

    def off(found):
        return sum((found[name] - exact[name]).norm().item() ** 2 for name in exact) ** 0.5

    plain, fed_back = off(mean_of_gradients(rank, {})), off(mean_of_gradients(rank, LOCO))
    assert fed_back < plain / 3
    often = {"zeropp_loco_param": {"err_beta": 0.0, "reset_T": 1}}
    assert off(mean_of_gradients(rank, often)) == pytest.approx(plain, rel=1e-4)
    forgotten = mean_of_gradients(rank, LOCO, between=lambda engine, step: engine.core.forget_errors())
    assert off(forgotten) == pytest.approx(plain, rel=1e-4)


@on_ranks(2)
def test_loading_a_checkpoint_forgets_errors(rank, world, tmp_path):
    def reload(engine, step):
        engine.save_checkpoint(str(tmp_path), tag="last")
        engine.load_checkpoint(str(tmp_path), tag="last")

    plain, loaded = mean_of_gradients(rank, {}), mean_of_gradients(rank, LOCO, between=reload)
    for name, grad in plain.items():
        torch.testing.assert_close(loaded[name], grad)


@on_ranks(2)
def test_loco_needs_quantized_gradients(rank, world):
    refused(ValueError, "zeropp_loco_param.*zero_quantized_gradients", engine_on, "ab", rank, 2,
            zero={"zero_quantized_gradients": False, **LOCO})  # fmt: skip


# ---- the functions of scripts ---------------------------------------------------------------------------------------
@on_ranks(4, init=True)
def test_coalesced_collectives(rank, world):
    from deepspeed.runtime.comm.coalesced_collectives import all_to_all_quant_reduce, reduce_scatter_coalesced

    torch.manual_seed(rank)
    tensors = [torch.randn(7), torch.randn(33, 9), torch.randn(2, 3), torch.randn(512, 4)]
    means = []
    for tensor in tensors:
        mean = tensor.clone()
        dist.all_reduce(mean)
        means.append((mean / world).flatten())

    def part(mean):
        width = -(-mean.numel() // world)
        return mean[rank * width : (rank + 1) * width]

    found = reduce_scatter_coalesced(tensors)
    for got, mean in zip(found, means, strict=True):
        torch.testing.assert_close(got, part(mean))
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    groups = dict(zip(["local_0", "local_1", "global_0", "global_1"], pairs))
    for given in ({}, groups):
        for tensor, got, mean in zip(tensors, all_to_all_quant_reduce(tensors, given), means, strict=True):
            assert got.shape == part(mean).shape
            scale = 1e-6 if tensor.dim() == 1 else 4 / 127 + (4 / 7 if given else 0)
            torch.testing.assert_close(got, part(mean), rtol=0, atol=scale / 2)
            assert tensor.dim() == 1 or tensor.numel() < 7 or not torch.equal(got, part(mean))
    assert reduce_scatter_coalesced([]) == [] and all_to_all_quant_reduce([], {}) == []
    refused(ValueError, "one dtype", reduce_scatter_coalesced, [torch.ones(2), torch.ones(2).double()])
    refused(ValueError, "got the groups", all_to_all_quant_reduce, [torch.ones(2, 2)], {"local_0": pairs[0]})
