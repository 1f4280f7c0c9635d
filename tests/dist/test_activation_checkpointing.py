"""Checkpointed segments of a tensor-parallel model: two ranks share every layer, and every saved activation."""

import types

import pytest
import torch
import torch.nn.functional as F

import deepspeed
from deepspeed import checkpointing
from deepspeed import comm as dist
from deepspeed.activation_checkpointing import settings
from deepspeed.activation_checkpointing.checkpointing import checkpoint, non_reentrant_checkpoint
from deepspeed.module_inject.layers import exchange_of
from harness import on_ranks, run_ranks
from models import Parts
from refusals import refused
from runs import engine_of, take_step

WIDTH, ROWS, LAYERS = 24, 5, 4


# All ranks are one model-parallel group.
MPU = types.SimpleNamespace(
    get_tensor_model_parallel_group=deepspeed.comm.get_world_group,
    get_tensor_model_parallel_rank=deepspeed.comm.get_rank,
    get_tensor_model_parallel_world_size=deepspeed.comm.get_world_size,
)


class Layer(torch.nn.Module):
    """Half of the hidden features per rank. Dropout on what is split draws from the tracker, else from the default."""

    def __init__(self, rank, world):
        super().__init__()
        first, second = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH, bias=False)
        part = slice(rank * 4 * WIDTH // world, (rank + 1) * 4 * WIDTH // world)
        self.up = torch.nn.Parameter(first.weight.detach()[part].clone())
        self.down = torch.nn.Parameter(second.weight.detach()[:, part].clone())

    def forward(self, x, scale):
        hidden = F.gelu(F.linear(exchange_of(dist.get_world_group()).copy_in(x), self.up))
        with checkpointing.get_cuda_rng_tracker().fork():
            hidden = F.dropout(hidden, 0.2)
        return x + scale * F.dropout(exchange_of(dist.get_world_group()).sum_out(F.linear(hidden, self.down)), 0.1)


def build(rank, world, dtype=torch.float32, rows=ROWS):
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(Layer(rank, world) for _ in range(LAYERS)).to(dtype)
    return layers, torch.randn(rows, WIDTH).to(dtype)


def train(call, layers, x):
    """Gradients of one step and the bytes that autograd keeps besides the weights."""
    checkpointing.model_parallel_cuda_manual_seed(7)
    layers.zero_grad(set_to_none=True)
    own = {p.data_ptr() for p in layers.parameters()}
    saved = {}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    hidden = x.clone().requires_grad_(True)
    leaf, kept = hidden, []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        for layer in layers:
            kept.append(hidden)  # alive, so that no address is counted for two tensors
            hidden = call(layer, hidden, 0.5)
    hidden.float().square().sum().backward()
    return [leaf.grad, *(p.grad for p in layers.parameters())], sum(saved.values())


def plainly(function, *args):
    return function(*args)


def body(rank, world, reentrant, options, dtype, rows):
    settings.forget()
    try:
        run = checkpoint if reentrant else non_reentrant_checkpoint
        checkpointing.configure(MPU)
        layers, x = build(rank, world, dtype, rows)
        expected, _ = train(plainly, layers, x)
        whole, whole_bytes = train(run, layers, x)
        checkpointing.configure(MPU, **options)
        sharded, sharded_bytes = train(run, layers, x)
        again, _ = train(run, layers, x)
        same = [all(torch.equal(one, other) for one, other in zip(got, expected)) for got in (whole, sharded, again)]
        return same, whole_bytes, sharded_bytes
    finally:
        settings.forget()


SHARDED = {"partition_activations": True}
CONTIGUOUS = {**SHARDED, "contiguous_checkpointing": True, "num_checkpoints": LAYERS}


@pytest.mark.sample("values")
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non_reentrant"])
@pytest.mark.parametrize(
    "options", [SHARDED, CONTIGUOUS, {**CONTIGUOUS, "checkpoint_in_cpu": True}], ids=["sharded", "contiguous", "cpu"]
)
def test_each_rank_keeps_half_and_gradients_are_the_same(options, reentrant):
    activation = ROWS * WIDTH * 4
    for same, whole, sharded in run_ranks(2, body, reentrant, options, torch.float32, ROWS, init=True):
        assert same == [True] * 3
        assert whole == LAYERS * activation
        assert sharded == whole // 2


@pytest.mark.parametrize("world, rows, dtype", [(3, 5, torch.float32), (2, 1, torch.bfloat16), (4, 7, torch.bfloat16)])
def test_sizes_that_do_not_divide_and_bf16(world, rows, dtype):
    size = 2 if dtype == torch.bfloat16 else 4
    shard = -(-rows * WIDTH // world)
    for same, whole, sharded in run_ranks(world, body, True, SHARDED, dtype, rows, init=True):
        assert same == [True] * 3
        assert whole == LAYERS * rows * WIDTH * size and sharded == LAYERS * shard * size


@on_ranks(2, init=True)
def test_ranks_with_different_activations_are_told(rank, world):
    settings.forget()
    try:
        checkpointing.configure(MPU, partition_activations=True)
        x = torch.full((4, 4), 1.0 + rank, requires_grad=True)
        refused(RuntimeError, "same activation on every model-parallel rank", checkpoint, torch.sin, x)
    finally:
        settings.forget()


@on_ranks(2, init=True)
def test_nested_segments_with_shards(rank, world):
    settings.forget()
    try:
        layers, x = build(rank, world)

        def outer(call):
            return lambda layer, hidden, scale: call(
                lambda value: call(layer, call(layer, value, scale), scale).tanh(), hidden
            )

        checkpointing.configure(MPU)
        expected, _ = train(outer(plainly), layers, x)
        checkpointing.configure(MPU, **CONTIGUOUS)
        for call in (checkpoint, non_reentrant_checkpoint):
            got, _ = train(outer(call), layers, x)
            assert all(torch.equal(one, other) for one, other in zip(got, expected))
    finally:
        settings.forget()


def forward_of_tokens(net, ids, call):
    hidden = call(net.embed, ids)
    for layer in (*net.layers, net.layers[0]):
        hidden = call(lambda value, layer=layer: torch.tanh(layer(value)), hidden)
    return net.head(hidden)


def of_tokens():
    """Everything in segments, the embedding too, whose input are token ids; one layer is used twice."""
    return Parts(
        forward_of_tokens,
        embed=torch.nn.Embedding(17, 12),
        layers=torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(2)),
        head=torch.nn.Linear(12, 5),
    )


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non_reentrant"])
@on_ranks(2)
def test_training_with_the_engine(rank, world, reentrant):
    settings.forget()
    weights = []
    for call in (plainly, checkpoint if reentrant else non_reentrant_checkpoint):
        torch.manual_seed(0)
        engine = engine_of(
            of_tokens(),
            {
                "train_batch_size": 4 * world,
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                "gradient_clipping": 0.5,
            },
        )
        generator = torch.Generator().manual_seed(rank)
        for _ in range(10):
            for _ in range(2):
                ids = torch.randint(0, 17, (2, 6), generator=generator)
                take_step(engine, F.cross_entropy(engine(ids, call).reshape(-1, 5), ids.reshape(-1) % 5))
        weights.append(torch.cat([p.detach().reshape(-1) for p in engine.module.parameters()]))
        engine.destroy()
    # The twice used layer adds its gradients in another order.
    assert (weights[0] - weights[1]).abs().max() < 1e-5 * weights[0].abs().max()
