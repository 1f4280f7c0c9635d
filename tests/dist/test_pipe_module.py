"""PipelineModule: each rank builds and runs its own layers, and together they are the model."""

import os
import time

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.activation_checkpointing import checkpointing
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.pipe.topology import PipeModelDataParallelTopology
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from harness import on_ranks
from models import seeded
from refusals import refused
from runs import TORCH2, by_rank_0, together

WIDTH = 6


class Block(nn.Module):
    built = []

    def __init__(self, width, name=None):
        super().__init__()
        self.linear = nn.Linear(width, width)
        if not self.linear.weight.is_meta:
            self.built.append(name)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def scaled(x):
    return x * 1.5


def specs(count=5):
    return [LayerSpec(Block, WIDTH, name=i) for i in range(count)] + [scaled]


def reference(count=5):
    """The same model in one process, seeded layer by layer."""
    return [seeded(Block, WIDTH, seed=1234 + number) for number in range(count)]


def inputs():
    torch.manual_seed(7)
    return torch.randn(3, WIDTH)


def run_pipe(module, x):
    """One forward through all parts, in the order of the model; the output on the rank of the last part."""
    shape, grid = module.pipe_shape, module.mpu()
    for part in range(len(module.parts) - 1):
        rank = grid.stage_to_global(shape.rank_of(part))
        if dist.get_rank() == rank:
            x = module(x, chunk=shape.chunk_of(part)).detach()
        dist.broadcast(x, rank, group=grid.get_pipe_parallel_group())
    return x


@pytest.mark.parametrize(
    "world, stages, virtual, placement, parts, local",
    [
        (1, 1, 1, "loop", [0, 6], [[0, 1, 2, 3, 4, 5]]),
        (2, 2, 1, "loop", [0, 3, 6], [[0, 1, 2], [3, 4, 5]]),
        (4, 2, 1, "loop", [0, 3, 6], [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]),
        (2, 2, 2, "loop", [0, 2, 4, 5, 6], [[0, 1, 4], [2, 3, 5]]),
        (2, 2, 2, "v", [0, 2, 4, 5, 6], [[0, 1, 5], [2, 3, 4]]),
    ],
)
@on_ranks(init=True)
def test_parts_are_the_model(rank, world, stages, virtual, placement, parts, local):
    Block.built.clear()
    module = PipelineModule(
        specs(), num_stages=stages, seed_layers=True, virtual_stages=virtual, placement=placement,
        partition_method="uniform",
    )  # fmt: skip
    assert module.num_pipeline_stages() == stages and module.topology().get_dim("pipe") == stages
    assert Block.built == [number for number in module.local_layers if number < 5]
    assert [module.stage_owner(number) for number in module.local_layers] == [module.stage_id] * len(
        module.local_layers
    )
    assert sorted(module.state_dict()) == sorted(
        f"{number}.linear.{name}" for number in module.local_layers if number < 5 for name in ("weight", "bias")
    )
    with torch.no_grad():
        found, wanted = run_pipe(module, inputs()), inputs()
        for layer in [*reference(), scaled]:
            wanted = layer(wanted)
    assert torch.equal(found, wanted)
    refused(IndexError, "there is no layer 6: the pipeline has 6", module.stage_owner, 6)
    if virtual > 1:
        refused(ValueError, "this stage has 2 parts of the model: say which", module, inputs())
    assert module.partitions() == parts and module.local_layers == local[rank]


@on_ranks(1, init=True)
def test_recomputed_segments(rank, world):
    calls = []

    def counting(function, *args):
        calls.append(len(args))
        return checkpointing.checkpoint(function, *args)

    def gradients(**options):
        module = PipelineModule(specs(), num_stages=1, seed_layers=True, **options)
        module(inputs()).sum().backward()
        return [parameter.grad for parameter in module.parameters()], module

    plain, module = gradients()
    assert module.is_checkpointable_results == []
    for options in (
        {"activation_checkpoint_interval": 2},  # the first segment's inputs want no gradient
        {"activation_checkpoint_interval": 2, "activation_checkpoint_func": checkpointing.non_reentrant_checkpoint},
    ):
        found, module = gradients(**options)
        assert module.is_checkpointable_results == [True, True, True] and module.activation_checkpoint_interval == 2
        assert all(torch.equal(a, b) for a, b in zip(found, plain))
    module = PipelineModule(
        specs(), num_stages=1, activation_checkpoint_interval=4, checkpointable_layers=["Block"],
        activation_checkpoint_func=counting,
    )  # fmt: skip
    assert module.is_checkpointable_results == [True, False]
    module(inputs().requires_grad_())
    assert calls == [1]
    module.set_checkpoint_interval(0)
    module(inputs())
    assert calls == [1] and module.is_checkpointable_results == []
    refused(ValueError, "activation_checkpoint_interval -1", module.set_checkpoint_interval, -1)


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand(1)


@on_ranks(1, init=True)
def test_seeds(rank, world):
    module = PipelineModule([Noise(), Noise()], num_stages=1, seed_layers=True, base_seed=50)
    zero = torch.zeros(1)
    found = [module(zero).item() for _ in range(2)]
    torch.manual_seed(50)
    a = torch.rand(1)
    torch.manual_seed(51)
    assert found[0] == (a + torch.rand(1)).item() != found[1]
    seen = []
    PipelineModule(specs(2), num_stages=1, seed_layers=True, seed_fn=seen.append, base_seed=10)
    assert seen == [10, 11, 12]


def logits(module, x):
    return x @ module.weight.t()


def tied_layers():
    return [
        TiedLayerSpec("embed", nn.Embedding, 11, WIDTH),
        LayerSpec(Block, WIDTH),
        LayerSpec(Block, WIDTH),
        TiedLayerSpec("embed", nn.Embedding, 11, WIDTH, forward_fn=logits),
    ]


@on_ranks(3, init=True)
def test_tied_layers(rank, world):
    torch.manual_seed(rank)  # copies begin unlike each other
    module = PipelineModule(tied_layers(), num_stages=3, partition_method=[0, 1, 3, 4])
    owns = module.stage_id != 1
    assert list(module.tied_modules) == (["embed"] if owns else [])
    assert [group_ranks["ranks"] for group_ranks in module.tied_comms.values()] == ([[0, 2]] if owns else [])
    tied = module.get_tied_weights_and_groups()
    assert len(tied) == owns
    for weight, group in tied:
        assert weight is module.tied_modules["embed"].weight and dist.get_all_ranks_from_group(group) == [0, 2]
        assert weight.ds_pipe_replicated == (rank == 2)
        if rank == 0:
            weight.grad = torch.ones_like(weight)
        module.allreduce_tied_weight_gradients()
        assert torch.equal(weight.grad, torch.ones_like(weight))
        x = torch.tensor([1, 2]) if rank == 0 else torch.ones(2, WIDTH)
        assert module(x).shape == (2, WIDTH if rank == 0 else 11)
    (first,), _, (last,) = together([weight.detach() for weight, _ in tied])
    assert torch.equal(first, last)


@on_ranks(4, init=True)
def test_layer_files(rank, world, folder):
    torch.manual_seed(rank)
    engine = TorchCheckpointEngine()
    saved = PipelineModule(tied_layers(), num_stages=2, partition_method="uniform")
    assert os.path.basename(saved.ckpt_prefix(folder, "tag")) == f"module-pipe_{saved.stage_id:02d}"
    saved.save_state_dict(folder, engine)
    dist.barrier()
    names = sorted(os.listdir(folder))
    assert names == [f"layer_0{number}-model_states.pt" for number in range(3)]
    assert saved.ckpt_layer_path(folder, 0) == os.path.join(folder, names[saved.local_layers[0]])
    assert saved.ckpt_layer_path_list(folder, 0) == [saved.ckpt_layer_path(folder, 0)]
    every = {number: torch.load(os.path.join(folder, name)) for number, name in enumerate(names)}
    for stages in (1, 2, 4):  # any number of stages reads them
        torch.manual_seed(100 + rank)
        module = PipelineModule(tied_layers(), num_stages=stages, partition_method="uniform")
        module.load_state_dir(folder, engine)
        for number in module.local_layers:
            local = module.local_layers.index(number)
            state = every[0 if number == 3 else number]
            found = module._modules_by_position[local].state_dict()
            assert all(torch.equal(state[name], value) for name, value in found.items())
    dist.barrier()
    by_rank_0(rank, os.remove, os.path.join(folder, names[1]))
    if 1 in saved.local_layers:
        refused(
            FileNotFoundError,
            "layer 1 of the pipeline is not in this checkpoint .* none",
            saved.load_state_dir,
            folder,
            engine,
        )
    else:
        saved.load_state_dir(folder, engine)
    frozen = PipelineModule([nn.Linear(2, 2)], num_stages=1)
    frozen.forward_funcs[0].weight.requires_grad = False
    frozen.save_state_dict(os.path.join(folder, "frozen"), engine, exclude_frozen_params=True)
    dist.barrier()
    assert list(torch.load(os.path.join(folder, "frozen", "layer_00-model_states.pt"))) == ["bias"]


@on_ranks(2, init=True)
def test_names_of_slices(rank, world):
    module = PipelineModule([nn.Linear(2, 2)], topology=PipeModelDataParallelTopology(1, 2, 1))
    assert module.ckpt_layer_path("x", 0) == f"x/layer_00-model_0{rank}-model_states.pt"
    assert module.mpu().get_slice_parallel_rank() == rank


class SlowWithoutParameters(nn.Module):
    def forward(self, x):
        time.sleep(0.02 * (1 + dist.get_rank()))  # ranks measure other times
        return x + 1


@on_ranks(2, init=True)
def test_profile_is_agreed_by_all_ranks(rank, world):
    layers = [LayerSpec(SlowWithoutParameters), *[LayerSpec(Block, WIDTH) for _ in range(4)]]
    by_time = PipelineModule(layers, num_stages=2, partition_method="profile", profile_input=inputs())
    assert len(by_time.layer_costs) == 5 and by_time.layer_costs[0].forward >= 0.03  # the mean
    refused(
        ValueError, "'profile' needs profile_input=", PipelineModule, layers, num_stages=2, partition_method="profile"
    )
    first, second = together(
        by_time.partitions(), by_time.layer_costs, PipelineModule(layers, num_stages=2).partitions()
    )
    assert first == second and first[2] == [0, 3, 5]


@on_ranks(3, init=True)
def test_bad_input(rank, world):
    refused(RuntimeError, "PipelineModule needs num_stages= or topology=", PipelineModule, specs())
    refused(RuntimeError, "num_stages 2 does not divide the 3 ranks of the job", PipelineModule, specs(), num_stages=2)
    refused(ValueError, "3 parts of the pipeline .* for 2 layers", PipelineModule, specs(1), num_stages=3)
    refused(ValueError, 'there is no placement "w"', PipelineModule, specs(), num_stages=3, placement="w")
    refused(
        ValueError,
        "checkpointable_layers is 'Block': give a list of class names",
        PipelineModule,
        specs(),
        num_stages=3,
        checkpointable_layers="Block",
    )
    text = PipelineModule([lambda x: "text", scaled, scaled], num_stages=3)
    if rank == 0:
        refused(TypeError, r"layer 0 \(<lambda>\) is the last of stage 0 and returned str", text, torch.ones(1))
    inner = PipelineModule([scaled] * 3, num_stages=3)
    if rank == 0:
        refused(NotImplementedError, "layer 0 is a PipelineModule: give its layers themselves", inner._build, 0, inner)
    if not TORCH2:
        refused(RuntimeError, "needs torch 2.0 or later", inner.compile)
    assert inner.get_additional_losses() is None
    assert deepspeed.PipelineModule is PipelineModule


def test_without_a_job():
    refused(
        RuntimeError,
        r"PipelineModule needs a job: call deepspeed.init_distributed\(\) first",
        PipelineModule,
        specs(),
        num_stages=1,
    )
