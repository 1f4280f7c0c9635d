"""``param.ds_tensor``, however it is written to, and the states that belong to flat tensors of masters."""

import copy
import io

import pytest
import torch

from deepspeed import comm as dist
from harness import on_ranks
from models import seeded
from runs import take_step, value_of, weights
from zero_training import Deep, loss_on, start

WRITES = {
    "data": lambda slice_, values: setattr(slice_, "data", values),
    "set_": lambda slice_, values: slice_.set_(values),
    "copy_": lambda slice_, values: slice_.copy_(values),
    "data.copy_": lambda slice_, values: slice_.data.copy_(values),
    "mul_ and add_": lambda slice_, values: slice_.mul_(0).add_(values),
    "slices": lambda slice_, values: slice_.__setitem__(slice(None), values),
}


def _step(engine, rank, step=0):
    take_step(engine, loss_on(engine, step, rank))


@pytest.mark.parametrize("world", [1, 3])
@on_ranks()
def test_writes_to_the_own_slice_are_gathered(rank, world):
    engine = start(seeded(Deep), 3, world)
    param = engine.module.layers[1].weight
    size = param.ds_tensor.numel()
    for number, (how, write) in enumerate(WRITES.items(), 1):
        wanted = torch.arange(36.0) + 100 * number
        padded = torch.cat([wanted, torch.zeros(world * size - 36)])
        write(param.ds_tensor, padded[rank * size : (rank + 1) * size].clone())
        dist.barrier()
        assert torch.equal(value_of(param), wanted.view(6, 6)), how
        dist.barrier()
    # In fp32 the slice is what the optimizer updates: training goes on from there.
    for name in list(WRITES)[:2]:
        WRITES[name](param.ds_tensor, torch.zeros(size))
    dist.barrier()
    _step(engine, rank)
    assert float(weights(engine)["layers.1.weight"].abs().max()) < 0.01
    dist.barrier()

    own = param.ds_tensor
    with pytest.raises(ValueError, match=r"'layers.1.weight': this rank's slice has shape \(\d+,\).*GatheredParam"):
        own.data = torch.zeros(size + 1)
    own.resize_(1)  # the tensor, not the slice
    assert param.ds_tensor.numel() == size and param.ds_tensor is not own
    assert param.ds_tensor.ds_numel == size and param.ds_tensor is param.ds_tensor
    assert type(param.ds_tensor + 1) is torch.Tensor and type(copy.deepcopy(param.ds_tensor)) is torch.Tensor
    torch.save(param.ds_tensor, saved := io.BytesIO())
    saved.seek(0)
    assert torch.equal(torch.load(saved), param.ds_tensor)
    param.ds_tensor = torch.ones(size, dtype=torch.float64)
    assert bool((param.ds_tensor == 1).all()) and param.ds_tensor.dtype == torch.float32


@pytest.mark.parametrize("native", [True, False])
@on_ranks(2)
def test_states_by_flat_tensor_of_masters(rank, world, native):
    model = seeded(Deep)
    # The adapter of torch's optimizer makes its states in the first step, and only where it has pieces.
    more = {} if native else {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    engine = start(model, 3, world, zero={"sub_group_size": 60}, **more)
    for step in range(2):
        _step(engine, rank, step)
    optimizer = engine.optimizer
    entries = len(optimizer.optimizer.state)
    flats = optimizer.fp32_partitioned_groups_flat
    assert len(flats) > 2
    saved = optimizer.state_dict()["optimizer_state_dict"]["state"]
    for position, flat in enumerate(flats):
        state = optimizer.optimizer.state[optimizer.fp32_partitioned_groups_flat[position]]
        assert state["step"] == 2 and state["exp_avg"].shape == flat.shape
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[name], saved[position][name]) and float(state[name].abs().sum()) > 0
    assert len(optimizer.optimizer.state) == entries, "nothing is added to the optimizer's own states"
    assert type(copy.deepcopy(optimizer.optimizer.state_dict())["state"]) is dict


@on_ranks(2)
def test_states_by_partition_at_stage_1(rank, world):
    engine = start(seeded(Deep), 1, world)
    _step(engine, rank)
    flat = engine.optimizer.single_partition_of_fp32_groups[0]
    state = engine.optimizer.optimizer.state[flat]
    assert state["step"] == 1 and state["exp_avg"].shape == flat.shape
