"""Checkpoints of 3D parallelism, stages of sliced layers: the files of Megatron-DeepSpeed, and any other number of
stages, slices and copies reads them."""

import os
import types

import pytest
import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.module_inject.layers import exchange_of
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from harness import run_ranks
from mpu import Mpu
from refusals import refused
from runs import NATIVE, engine_of, load_into, moments, settings, take_step

LAYERS, WIDTH, HIDDEN, MICRO_BATCHES = 3, 4, 8, 2
ROWS = {"up": 0, "down": 1, "gate": 0}  # along which dimension each is cut
INFO = {
    "parameter_with_row_parallelism_patterns": [r".*\.down"],
    "tp_replicated_parameter_patterns": [r".*\.bias"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*\.gate"],
}


class Sliced(nn.Module):
    """``gate`` is two matrices in one, each cut."""

    def __init__(self, number, grid, told):
        super().__init__()
        torch.manual_seed(number)
        self.grid = grid
        rank, size = self.grid.get_slice_parallel_rank(), self.grid.get_slice_parallel_world_size()
        gates = torch.randn(2, HIDDEN, WIDTH).chunk(size, 1)[rank]
        self.up = nn.Parameter(torch.randn(HIDDEN, WIDTH).chunk(size, 0)[rank].clone())
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN).chunk(size, 1)[rank].clone())
        self.gate = nn.Parameter(gates.reshape(-1, WIDTH).clone())
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("number", torch.tensor([float(number)]))
        for name, dim in ROWS.items():
            one = getattr(self, name)
            one.tensor_model_parallel = True
            if told:
                one.partition_dim, one.partition_stride = dim, 2 if name == "gate" else 1

    def forward(self, x):
        group = self.grid.get_slice_parallel_group()
        inside = exchange_of(group).copy_in(x)
        a, b = (inside @ self.gate.t()).chunk(2, -1)
        return x + exchange_of(group).sum_out((torch.tanh(inside @ self.up.t()) * a + b) @ self.down.t()) + self.bias


def make(rank, world, stages, slices, stage, native=False, told=True):
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=slices, num_dp=world // (stages * slices))
    grid = PipelineParallelGrid(topology)
    module = PipelineModule(
        [LayerSpec(Sliced, number, grid, told) for number in range(LAYERS)], topology=topology,
        loss_fn=nn.functional.mse_loss, partition_method="uniform",
    )  # fmt: skip
    config = settings(stage, 1, None, checkpoint=NATIVE if native else {}, train_batch_size=2 * MICRO_BATCHES)
    return engine_of(module, config)


def train(engine):
    """The same four samples, whoever has them."""
    copies, copy = engine.grid.get_data_parallel_world_size(), engine.grid.get_data_parallel_rank()
    data = torch.sin(torch.arange(4.0 * MICRO_BATCHES * WIDTH)).view(2 * MICRO_BATCHES, 2, 1, WIDTH)[copy::copies]
    return engine.train_batch(iter([(x, y) for x, y in data])).item()


def states(engine):
    """``(slice, name -> its fp32 weight and moments, and buffers)``."""
    found = {name: [value.clone()] for name, value in engine.module.named_buffers()}
    found.update({name: [kind.clone() for kind in kinds] for name, kinds in moments(engine).items()})
    return engine.grid.get_slice_parallel_rank(), found


def joined(of_ranks):
    """name -> whole tensors."""
    slices = {}
    for place, found in of_ranks:
        for name, kinds in found.items():
            slices.setdefault(name, {}).setdefault(place, kinds)
    whole = {}
    for name, parts in slices.items():
        kinds = zip(*(parts[place] for place in sorted(parts)))
        leaf = name.split(".")[-1]
        if leaf == "gate":
            kinds = ([one.view(2, -1, WIDTH).transpose(0, 1) for one in kind] for kind in kinds)
        whole[name] = [torch.cat(list(kind), ROWS[leaf]) if leaf in ROWS else kind[0] for kind in kinds]
    return whole


def save(rank, world, stages, slices, stage, native, client_state, folder):
    engine = make(rank, world, stages, slices, stage, native)
    train(engine)
    engine.save_checkpoint(folder, tag="t", client_state=client_state)
    return states(engine), [train(engine)]


def load(rank, world, stages, slices, stage, told, folder):
    engine = make(rank, world, stages, slices, stage, told=told)
    for buffer in engine.module.buffers():
        buffer.zero_()
    engine.load_checkpoint(folder, tag="t")
    return states(engine), [train(engine)]


def same(loaded, saved):
    found, wanted = (joined([states for states, _ in one]) for one in (loaded, saved))
    assert found.keys() == wanted.keys() and len(found) == 5 * LAYERS
    for name, kinds in wanted.items():
        assert all(torch.equal(a, b.view(a.shape)) for a, b in zip(found[name], kinds, strict=True)), name


def test_files_and_the_same_layout(tmp_path):
    saved = run_ranks(4, save, 2, 2, 1, False, {}, str(tmp_path), init=True)
    names = {name for name in os.listdir(tmp_path / "t") if name.endswith(".pt") and "run_state" not in name}
    layers = {f"layer_{layer:02d}-model_{part:02d}-model_states.pt" for layer in range(LAYERS) for part in range(2)}
    models = {f"mp_rank_{rank:02d}_model_states.pt" for rank in range(4)}
    optimizers = {f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt" for rank in range(4)}
    assert layers | models | optimizers <= names and not {one for one in names - layers if one.startswith("layer")}
    part = torch.load(tmp_path / "t" / "layer_01-model_01-model_states.pt")
    assert set(part) == {"up", "down", "gate", "bias", "number"} and part["up"].shape == (HIDDEN // 2, WIDTH)
    model = torch.load(tmp_path / "t" / "mp_rank_03_model_states.pt", weights_only=False)
    assert model["module"] is None and model["mp_world_size"] == 4
    loaded = run_ranks(4, load, 2, 2, 1, True, str(tmp_path), init=True)
    same(loaded, saved)
    assert [losses for _, losses in loaded] == [losses for _, losses in saved]  # bit by bit


@pytest.mark.sample("values")
@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("world, stages, slices", [(2, 2, 1), (1, 1, 1), (4, 1, 4), (2, 1, 2), (4, 2, 1), (3, 3, 1)])
@pytest.mark.parametrize("after", [0, 2, 3])
def test_any_number_of_slices_reads_it(before, native, world, stages, slices, after, tmp_path):
    saved = run_ranks(4, save, 2, 2, before, native, {}, str(tmp_path), init=True)
    loaded = run_ranks(world, load, stages, slices, after, True, str(tmp_path), init=True)
    same(loaded, saved)
    assert loaded[0][1] == pytest.approx(saved[0][1], rel=1e-4)


def _refused(rank, world, folder):
    engine = make(rank, world, 1, 1, 1, told=False)
    refused(
        (ValueError, RuntimeError),
        r"along which dimension parameter '\d\.up' is cut: set its",
        engine.load_checkpoint,
        folder,
        tag="t",
    )
    for param in engine.module.parameters():
        param.tensor_model_parallel = False
    refused(
        (ValueError, RuntimeError),
        "differs among the 2 tensor-parallel ranks that saved it",
        engine.load_checkpoint,
        folder,
        tag="t",
    )


def test_what_nobody_says_is_refused(tmp_path):
    run_ranks(2, save, 1, 2, 1, False, {}, str(tmp_path), init=True)
    run_ranks(1, _refused, str(tmp_path), init=True)


def _loads_universal(rank, world, folder):
    engine = load_into(make(rank, world, world, 1, 1, told=False), folder, tag="universal")
    assert dist.get_world_size() == world
    return states(engine), []


def test_what_the_checkpoint_says(tmp_path):
    saved = run_ranks(4, save, 2, 2, 1, False, {"universal_checkpoint_info": INFO}, str(tmp_path), init=True)
    same(run_ranks(1, load, 1, 1, 0, False, str(tmp_path), init=True), saved)
    folders = {"input_folder": str(tmp_path / "t"), "output_folder": str(tmp_path / "universal")}
    ds_to_universal.main(types.SimpleNamespace(**folders))
    same(run_ranks(2, _loads_universal, str(tmp_path), init=True), saved)


# ---- models without stages ----------------------------------------------------------------------------------------
def _unstaged(rank, world, slices, stage):
    """An engine with an mpu; ranks of a data-parallel group lie ``slices`` apart."""
    starts = range(0, world, slices)
    rows = [dist.new_group(list(range(start, start + slices))) for start in starts]
    columns = [dist.new_group(list(range(slice_, world, slices))) for slice_ in range(slices)]
    mpu = Mpu(columns[rank % slices], rows[rank // slices])
    grid = types.SimpleNamespace(
        get_slice_parallel_rank=mpu.get_model_parallel_rank,
        get_slice_parallel_world_size=mpu.get_model_parallel_world_size,
        get_slice_parallel_group=mpu.get_model_parallel_group,
    )
    module = nn.Sequential(*(Sliced(number, grid, True) for number in range(LAYERS)))
    config = settings(stage, 1, train_batch_size=world // slices, train_micro_batch_size_per_gpu=None)
    return engine_of(module, config, mpu=mpu)


def _step(engine):
    data = torch.sin(torch.arange(2.0 * WIDTH)).view(2, 1, WIDTH)
    return take_step(engine, nn.functional.mse_loss(engine(data[0]), data[1]))


def _of_slice(engine):
    found = {name: [value.clone()] for name, value in engine.module.named_buffers()}
    found.update({name: [kind.clone() for kind in kinds] for name, kinds in moments(engine).items()})
    return engine.mpu.get_model_parallel_rank(), found


def _save_unstaged(rank, world, slices, stage, folder):
    engine = _unstaged(rank, world, slices, stage)
    _step(engine)
    engine.save_checkpoint(folder, tag="t")
    return _of_slice(engine), [_step(engine)]


def _load_unstaged(rank, world, slices, stage, folder):
    engine = load_into(_unstaged(rank, world, slices, stage), folder, tag="t")
    return _of_slice(engine), [_step(engine)]


@pytest.mark.parametrize("before, saved_at, after, loaded_at", [(2, 1, 1, 3), (1, 0, 4, 2), (4, 3, 2, 0)])
def test_any_number_of_slices_reads_a_model_without_stages(before, saved_at, after, loaded_at, tmp_path):
    saved = run_ranks(4, _save_unstaged, before, saved_at, str(tmp_path), init=True)
    loaded = run_ranks(4, _load_unstaged, after, loaded_at, str(tmp_path), init=True)
    same(loaded, saved)
    assert loaded[0][1] == pytest.approx(saved[0][1], rel=1e-4)
