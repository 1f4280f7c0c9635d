"""The CUDA kernels on the stand-in device: the library that runs them on the CPU is what DS_STANDIN_KERNELS names, and
its launches are queued on the stand-in's streams. Their bits are those of memory of the host and of the CPU's kernels,
and a launch that is not ordered is found."""

import contextlib
import functools
import os

import pytest
import standin
import standin_kernels
import torch

import deepspeed
import fake_nccl
from deepspeed import linear, ops
from deepspeed.ops.attention import Dropped, KeyBlocks, attention
from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention
from deepspeed.ops.sparse_attention import BigBirdSparsityConfig, SparseSelfAttention
from deepspeed.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer, functions
from engine_models import make_net, net_engine, train_engine
from harness import run_ranks
from runs import DTYPES, raised, weights
from sampling import every_case, sample

pytestmark = pytest.mark.skipif(not standin.supported(), reason="the stand-in device needs torch 2.9 or newer")

SEEDS = (1, 2)  # with one of them all is lazy


def queued(fn, *args, **more):
    """The result of ``fn`` on the stand-in with the CUDA kernels."""
    env = {"DS_STANDIN_KERNELS": standin_kernels.library_path(), "DS_STANDIN_STACKS": "python"}
    return run_ranks(1, fn, *args, fresh=True, env=env, timeout=400, **more)[0]


def on_host(rank, world):
    return standin_kernels.call_every_entry(standin_kernels.host_tables())


def on_standin(rank, world):
    standin.load()
    tables, results = standin_kernels.standin_tables(), []
    for seed in SEEDS:
        standin.choose(seed, lazy=seed % 2 == 1)
        with standin.no_faults():
            results.append(standin_kernels.call_every_entry(tables))
    return results


def same_bits(one, other):
    bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and torch.equal(*bits)


def test_each_entry_gives_the_bits_of_host_memory():
    expected = run_ranks(1, on_host, fresh=True)[0]
    for results in queued(on_standin):
        for (name, found), (again, wanted) in zip(results, expected, strict=True):
            assert name == again
            for at, (one, other) in enumerate(zip(found, wanted, strict=True)):
                assert same_bits(one, other), (name, at)


OPTIMIZERS = (
    (ops.adam.FusedAdam, {"weight_decay": 0.1}),
    (ops.adam.Adam8bit, {}),
    (ops.adagrad.FusedAdagrad, {}),
    (ops.lamb.FusedLamb, {}),
    (ops.lion.FusedLion, {}),
    (ops.sgd.FusedSGD, {"momentum": 0.9, "lr": 0.1}),
)


def stepped(rank, world, device):
    """Parameters and states after steps of each optimizer of deepspeed, while another device is the current one."""
    if device != "cpu":
        standin.load()
        standin.choose(3, lazy=True)
    found = []
    for cls, settings in OPTIMIZERS:
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(5)
            drawn = [torch.randn(4, *size, generator=generator) for size in ((1,), (33, 5), (700, 17), (0,))]
            params = [torch.nn.Parameter(one[0].to(dtype).to(device)) for one in drawn]
            optimizer = cls(params, **settings)
            for step in range(1, 4):
                for param, one in zip(params, drawn, strict=True):
                    param.grad = one[step].to(dtype).to(device)
                optimizer.step()
            states = [value for param in params for value in optimizer.state[param].values() if torch.is_tensor(value)]
            found.append([one.detach().cpu() for one in (*params, *states)])
    return found, standin.faults() if device != "cpu" else []


def test_optimizers_give_the_bits_of_the_kernels_of_the_cpu():
    expected, _ = run_ranks(1, stepped, "cpu", fresh=True)[0]
    found, faults = queued(stepped, "standin:1")
    assert faults == []
    for (cls, _), ours, theirs in zip([one for one in OPTIMIZERS for _ in "ab"], found, expected, strict=True):
        assert all(same_bits(one, other) for one, other in zip(ours, theirs, strict=True)), cls


def routed(rank, world, device):
    if device != "cpu":
        standin.load()
    routes, attention = (getattr(deepspeed._native._C, name)(1) for name in ("RouteOps", "AttentionOps"))
    generator = torch.Generator().manual_seed(5)
    logits, rows, queries = (
        torch.randn(size, generator=generator).to(device) for size in ((40, 6), (40, 33), (1, 2, 9, 8))
    )
    probs, index = routes.topk_gate(logits, 2)
    moved = routes.permute_rows(rows, index, 1)
    joined = routes.combine_rows(rows, index, probs[:, :2].contiguous())
    dots = routes.dot_rows(rows, rows, index)
    state = [torch.zeros(1, 2, 9, size, device=device) for size in (1, 1, 8)]
    attention.forward([queries] * 3, state, True, deepspeed._native._C.BlockRules(0.3, True))
    return [
        one.cpu() for one in (index, moved, joined, probs, dots, *state)
    ], standin.faults() if device != "cpu" else []


def test_routes_and_attention_run_there():
    expected, _ = run_ranks(1, routed, "cpu", fresh=True)[0]
    found, faults = queued(routed, "standin:1")
    assert faults == []
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        # exponentials, and sums over a row, have other last bits on each instruction set, too
        assert same_bits(one, other) if at < 2 else torch.allclose(one, other, rtol=1e-5, atol=1e-6), at


def attended(rank, world, device):
    """Whole attention with layouts, biases and dropout: outputs and all gradients."""
    if device != "cpu":
        standin.load()
        standin.choose(3, lazy=True)
    generator, found = torch.Generator().manual_seed(5), []

    def leaf(*sizes, dtype=torch.float32):
        return torch.randn(sizes, generator=generator).to(dtype).to(device).requires_grad_()

    def both_ways(output, leaves):
        upper = torch.ones_like(output)
        found.extend(one.detach().float().cpu() for one in (output, *torch.autograd.grad(output, leaves, upper)))

    for dtype in (torch.float32, torch.bfloat16):
        leaves = [leaf(2, 4, 48, 16, dtype=dtype) for _ in range(3)]
        biases = [leaf(1, 4, 48, 48, dtype=dtype), leaf(2, 1, 1, 48)]
        layout = torch.rand(4, 3, 3, generator=generator) < 0.6
        attended_to = attention(
            *leaves, biases=biases, blocks=KeyBlocks(layout, 16), causal=True, dropped=Dropped(0.2, seed=7)
        )
        both_ways(attended_to, [*leaves, *biases])
        both_ways(SparseSelfAttention(BigBirdSparsityConfig(4, block=8))(*leaves), leaves)
    leaves = [leaf(2, 3, 20, 2, 8) for _ in range(3)]
    biases = [leaf(2, 3, 1, 1, 20), leaf(2, 1, 2, 20, 20)]
    both_ways(DS4Sci_EvoformerAttention(*leaves, biases), [*leaves, *biases])
    return found, standin.faults() if device != "cpu" else []


def test_whole_attention_runs_there():
    expected, _ = run_ranks(1, attended, "cpu", fresh=True)[0]
    found, faults = queued(attended, "standin:1")
    assert faults == []
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        most = 1e-5 if at < 10 or at > 19 else 2e-2  # the middle ones are bf16
        assert torch.allclose(one, other, rtol=most, atol=most), (at, float((one - other).abs().max()))


def trained_layers(rank, world, device):
    """Losses and weights of layers with dropout and all memory flags, trained by an engine; and other operations."""
    if device != "cpu":
        standin.load()
        deepspeed.accelerator.set_accelerator(standin.Standin_Accelerator())
        standin.choose(4, lazy=True)
    found = []
    for pre in (False, True):
        config = DeepSpeedTransformerConfig(
            4, 32, 64, 4, 0.1, 0.2, 2, 0.2, seed=3, pre_layer_norm=pre, normalize_invertible=True,
            gelu_checkpoint=True, attn_dropout_checkpoint=True,
        )  # fmt: skip
        model = torch.nn.Sequential(*(DeepSpeedTransformerLayer(config) for _ in range(2)), torch.nn.Linear(32, 1))
        settings = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}
        settings["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
        engine, *_ = deepspeed.initialize(model=model, config=settings)
        torch.manual_seed(5)
        for step in range(3):
            x = torch.randn(4, 9, 32, generator=torch.Generator().manual_seed(step)).to(engine.device)
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.detach().cpu())
        engine.destroy()
    x = torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    for out in (
        functions.rotary(x, torch.arange(6, device=device), 8, interleaved=True),
        functions.activation(x, kind="silu", gated=True),
        functions.norm(x, x.new_ones(16), centered=False),
    ):
        found += [out.detach().cpu(), torch.autograd.grad(out, x, torch.ones_like(out))[0].cpu()]
    return found, standin.faults() if device != "cpu" else []


def test_transformer_layers_train_there():
    expected, _ = run_ranks(1, trained_layers, "cpu", fresh=True)[0]
    found, faults = queued(trained_layers, "standin:0")
    assert faults == []
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), (at, float((one - other).abs().max()))


def trained_lora(rank, world, device):
    """Losses, and where frozen weights rest, of linear layers with LoRA that an engine trains; stages 2 and 3."""
    if device != "cpu":
        standin.load()
        deepspeed.accelerator.set_accelerator(standin.Standin_Accelerator())
        standin.choose(4, lazy=True)
    found, places = [], []
    for stage, offload, bits in [(2, True, 8), (1, True, None), (2, False, 6), (3, False, 4)]:
        torch.manual_seed(2)
        lora = linear.LoRAConfig(lora_r=4, offload=offload)
        coded = bits and linear.QuantizationConfig(q_bits=bits, group_size=32)
        make = functools.partial(linear.OptimizedLinear, 32, 32, lora_config=lora, dtype=torch.float32, device="cpu")
        model = torch.nn.Sequential(*(make(bias=bias, quantization_config=coded) for bias in (True, False)))
        for layer in model:
            torch.nn.init.normal_(layer.lora_weight_2.weight, std=0.1)
        settings = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
        settings["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
        engine, *_ = deepspeed.initialize(model=model, config=settings)
        for step in range(3):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step)).to(engine.device)
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.detach().cpu())
        places.append([model[0].weight.device.type if stage < 3 else None, model[0].lora_weight_1.weight.device.type])
        engine.destroy()
    return found, places, standin.faults() if device != "cpu" else []


def test_linear_layers_with_frozen_weights_train_there():
    expected, *_ = run_ranks(1, trained_lora, "cpu", fresh=True)[0]
    found, places, faults = queued(trained_lora, "standin:0")
    assert faults == []
    assert places == [["cpu", "standin"], ["cpu", "standin"], ["standin", "standin"], [None, "standin"]]
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), (at, float((one - other).abs().max()))


def offloaded_at_stage_3(rank, world):
    standin.load()
    deepspeed.accelerator.set_accelerator(standin.Standin_Accelerator())
    model = linear.OptimizedLinear(8, 8, lora_config=linear.LoRAConfig(lora_r=2, offload=True), dtype=torch.float32)
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    settings["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
    return raised(deepspeed.initialize, model=model, config=settings)


def test_stage_3_refuses_weights_that_rest_on_the_host():
    kind, text = queued(offloaded_at_stage_3)
    assert kind == "ValueError" and "'weight' rests on cpu" in text and "offload_param" in text


SIZE = 500


def scale(tables, values, stream=None):
    """values *= 2, by a kernel on a stream."""
    tables.stream = 0 if stream is None else stream.stream_id
    tables.call("scale", values, values.dtype, values.numel(), 2.0)


def before_a_kernel(tables, now, side, fault):
    values = torch.ones(SIZE, device="standin")
    if not fault:
        side.wait_stream(now)
    scale(tables, values, side)
    now.wait_stream(side)
    assert fault or values.sum().item() == 2 * SIZE


def behind_a_kernel(tables, now, side, fault):
    values = torch.ones(SIZE, device="standin")
    side.wait_stream(now)
    scale(tables, values)
    if not fault:
        side.wait_stream(now)
    with side:
        total = values.sum()
    now.wait_stream(side)
    assert fault or total.item() == 2 * SIZE


def between_kernels_that_share_an_element(tables, now, side, fault):
    values = torch.ones(SIZE, device="standin")  # one page
    side.wait_stream(now)
    scale(tables, values[:200])
    scale(tables, values[199 if fault else 200 :], side)
    now.wait_stream(side)
    assert fault or values.sum().item() == 2 * SIZE


def behind_a_copy_by_the_runtime(tables, now, side, fault):
    values, to = torch.ones(SIZE, device="standin"), torch.zeros(SIZE, device="standin")
    side.wait_stream(now)
    tables.stream = 0
    tables.call("copy", to, to.dtype, values, values.dtype, SIZE, 1.0)
    if not fault:
        side.wait_stream(now)
    with side:
        values.zero_()
    now.wait_stream(side)
    assert fault or to.sum().item() == SIZE


PLANTED = [before_a_kernel, behind_a_kernel, between_kernels_that_share_an_element, behind_a_copy_by_the_runtime]


def planted(rank, world):
    standin.load()
    tables, found = standin_kernels.standin_tables(), []
    now, side = torch.standin.current_stream(), torch.standin.Stream()
    for body in PLANTED:
        for seed in range(1, 21):
            for fault in (True, False):
                standin.choose(seed, lazy=seed % 2 == 0)
                standin.faults(clear=True)
                body(tables, now, side, fault)
                torch.standin.synchronize()
                error = tables.entries["last_error"]()  # the other work may change what the kernel reads
                assert fault or not error, error
                found.append((body.__name__, fault, standin.faults(clear=True)))
    return found


def test_a_missing_wait_beside_a_kernel_is_found_for_every_seed_and_nothing_else():
    for name, fault, texts in queued(planted):
        assert bool(texts) == fault, (name, texts)
        if fault:
            assert "have no order" in texts[0] and "of CUDA" in texts[0], texts[0]
            assert texts[0].count(f"in {name}") >= 2, f"both stacks name the test: {texts[0]}"


def misplaced(rank, world):
    standin.load()
    tables, texts = standin_kernels.standin_tables(), []
    for values in (torch.ones(SIZE, device="standin:1"), torch.ones(SIZE)):
        torch.standin.synchronize(1)
        scale(tables, values)
        torch.standin.synchronize()
        texts += standin.faults(clear=True)
    tables.stream = torch.standin.Stream(1).native_handle
    with pytest.raises(RuntimeError, match="on a stream of standin:1 while standin:0 is the current device"):
        tables.call("scale", values, values.dtype, SIZE, 2.0)
    return texts


def test_a_kernel_on_the_wrong_device_is_found():
    first, second = queued(misplaced)
    assert "kernel of CUDA on standin:0 touches memory of another device" in first
    assert "kernel of CUDA on standin:0 writes memory of the host that is not pinned" in second


STEPS = 10
OFFLOADS = {
    "none": {},
    "states": {"offload_optimizer": {"device": "cpu"}},
    "pinned": {"offload_optimizer": {"device": "cpu", "pin_memory": True}},
}
CASES = [
    (world, stage, dtype, accumulate, offload)
    for world in (1, 2)
    for stage in (0, 1, 2, 3)
    for dtype in DTYPES
    for accumulate in (1, 2)
    for offload in OFFLOADS
    if offload == "none" or stage > 0
]


def trained_once(rank, world, device, stage, dtype, accumulate, offload):
    """Losses, norms and parameters."""
    more = {"model": make_net(), "zero": OFFLOADS[offload], **DTYPES[dtype]}
    engine = net_engine(world, stage, accumulate, **more)
    assert engine.device.type == device
    losses, norms = train_engine(engine, STEPS, rank, world)
    found = losses, norms, {name: value.float().cpu() for name, value in weights(engine).items()}
    engine.destroy()
    return found


def trained_on_cpu(rank, world, cases):
    return [trained_once(rank, world, "cpu", *case[1:]) for case in cases]


def trained(rank, world, cases):
    """On the stand-in, in every second case on a stream that the user has chosen."""
    deepspeed.accelerator.set_accelerator(standin.Standin_Accelerator())
    found = []
    for seed, case in enumerate(cases):
        standin.choose(seed, lazy=seed % 2 == 1)
        with torch.standin.Stream() if seed // 2 % 2 else contextlib.nullcontext():
            found.append(trained_once(rank, world, "standin", *case[1:]))
    assert standin.faults_at_end() == []
    if (path := os.environ.get("DS_STANDIN_NCCL")) and world > 1:
        assert fake_nccl.Orders(path).count("ncclAllReduce") > 0
    return found


@functools.cache
def chosen_and_expected(world):
    """The cases of a world, and what the CPU finds in each."""
    chosen = range(len(CASES)) if every_case() else sample(CASES)
    cases = [CASES[index] for index in chosen if CASES[index][0] == world]
    return cases, run_ranks(world, trained_on_cpu, cases, init=world > 1, timeout=900)[0]


@pytest.mark.parametrize(
    "kernels, transport, world",
    [("cuda", "gloo", 1), ("cuda", "gloo", 2), ("cuda", "nccl", 2), ("any", "gloo", 1), ("any", "gloo", 2)],
)
def test_engines_equal_those_of_the_cpu(kernels, transport, world, tmp_path):
    cases, expected = chosen_and_expected(world)
    variables = {"DS_STANDIN_KERNELS": standin_kernels.library_path()} if kernels == "cuda" else {}
    if transport == "nccl":
        variables["DS_STANDIN_NCCL"] = fake_nccl.build(tmp_path)
    found = run_ranks(world, trained, cases, init=world > 1, fresh=True, timeout=900, env=variables)[0]
    for case, (losses, norms, values), wanted in zip(cases, found, expected, strict=True):
        # NCCL rounds sums of 16-bit gradients to 16 bits; over gloo they stay fp32 where masters are.
        if kernels == "cuda" and (transport == "gloo" or case[2] == "fp32"):
            assert (losses, norms) == wanted[:2], case
            assert all(torch.equal(value, wanted[2][name]) for name, value in values.items()), case
        else:
            near = {"fp32": 1e-6, "bf16": 2**-7, "fp16": 2**-10}[case[2]]
            assert losses == pytest.approx(wanted[0], rel=near) and norms == pytest.approx(wanted[1], rel=near), case
            for name, value in values.items():
                assert torch.allclose(value, wanted[2][name], rtol=near, atol=near), (case, name)
