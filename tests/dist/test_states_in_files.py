"""States of ``torch.optim.AdamW`` and the like rest in files: ``offload_optimizer.device`` nvme."""

import copy
import functools
import os
import pickle
from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from deepspeed.zero.states.states_in_files import StatesOfMaster, split_states
from engine_models import after_steps, loss_on, make_net, train_engine
from harness import on_ranks
from plain import Plain
from runs import by_rank_0, equal_bits, everything, identical, last_of, load_into, take_step
from test_checkpoint_universal import to_universal
from test_offload_optimizer import files_below, make_engine, on


class CountsItsSteps(torch.optim.SGD):
    """Keeps a number in its groups, as some optimizers count their steps."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            group["lr"] = 0.01 / group["calls"]
        return super().step(closure)


MAKERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=3e-3, amsgrad=True),
    "SGD": lambda params: CountsItsSteps(params, lr=0.01, momentum=0.9),
}


def engine_of(world, stage, offload, maker="AdamW", **more):
    model = make_net()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[:2], "weight_decay": 0.0}, {"params": trained[2:]}]
    more = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True, **more}
    zero = {"sub_group_size": 300}
    return make_engine(world, stage, offload, model=model, optimizer=MAKERS[maker](groups), zero=zero, **more)


def in_files(engine):
    return [states for states in engine.basic_optimizer.state.values() if isinstance(states, StatesOfMaster)]


@pytest.mark.any_device
@pytest.mark.sample("values", 5)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_every_bit_is_that_of_states_in_memory(rank, world, stage, maker, dtype, folder):
    def trained(offload):
        engine = engine_of(world, stage, offload, maker, gradient_clipping=0.5, bf16={"enabled": dtype == "bf16"})
        losses, _ = train_engine(engine, 4, rank, world)
        if offload is not None:
            assert len(in_files(engine)) == len(engine.basic_optimizer.state)
            assert all(split_states(states, master)[0] for master, states in engine.basic_optimizer.state.items())
            below = os.path.join(folder, f"zero_stage_{stage}", "optimizer", f"rank{rank}")
            assert files_below(below), "states rest in files"
        calls = [group.get("calls") for group in engine.basic_optimizer.param_groups]
        return engine, (losses, calls)

    equal_bits(trained, None, on(folder, "nvme"))
    deepspeed.comm.barrier()
    assert not files_below(folder), "removed with the engine"


@pytest.mark.any_device
@on_ranks(1)
def test_equals_plain_pytorch(rank, world, folder):
    """Against PyTorch without an engine."""
    model = make_net()
    adamw = functools.partial(torch.optim.AdamW, lr=3e-3)
    plain = Plain(model, adamw, dtype=None).run(lambda model, step, part: loss_on(model, step), range(3))
    mine = adamw([p for p in model.parameters() if p.requires_grad])
    more = {"zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.0}
    engine = make_engine(world, 2, on(folder, "nvme"), model=model, optimizer=mine, **more)
    for step in range(3):
        take_step(engine, loss_on(engine, step))
    for a, b in zip(engine.module.parameters(), plain.params.values()):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-6, atol=1e-7)


@pytest.mark.any_device
@pytest.mark.parametrize("stage, next_stage", [(2, 2), (3, 3), (1, 3)])
@on_ranks(2)
def test_checkpoints(rank, world, stage, next_stage, folder):
    swap, more = os.path.join(folder, "swap"), {"bf16": {"enabled": True}}
    plain = after_steps(engine_of(world, stage, None, **more), 4, rank, world)
    first = after_steps(engine_of(world, stage, on(swap, "nvme"), **more), 3, rank, world)
    first.save_checkpoint(folder, tag="t")
    found = []
    for offload in (on(os.path.join(folder, "other"), "nvme"), None):
        second = load_into(engine_of(world, next_stage, offload, **more), folder, tag="t")
        assert bool(in_files(second)) == (offload is not None)
        found.append(last_of(after_steps(second, 1, rank, world, start=3), everything))
    assert identical(*found)
    if stage == next_stage:
        # Parameters that nobody has used have no state there, and zeros in the checkpoint.
        assert all(b is None or torch.equal(a, b) for a, b in zip(found[0], everything(plain), strict=True))


@on_ranks(2)
def test_universal_checkpoints(rank, world, folder):
    in_drive, more = on(os.path.join(folder, "swap"), "nvme"), {"bf16": {"enabled": True}}
    engine = after_steps(engine_of(world, 2, in_drive, **more), 2, rank, world)
    engine.save_checkpoint(folder, tag="t")
    engine.destroy()
    by_rank_0(rank, to_universal, folder)
    more["checkpoint"] = {"load_universal": True}
    engines = (load_into(engine_of(world, 3, offload, **more), folder) for offload in (None, in_drive))
    assert identical(*(last_of(after_steps(engine, 1, rank, world, start=2), everything) for engine in engines))


def fail():
    raise RuntimeError("this step fails")


@on_ranks(1)
def test_states_are_read_and_written_by_name(rank, world, folder):
    engine = after_steps(engine_of(world, 2, on(folder, "nvme")), 2, rank, world)
    param = next(p for p in engine.module.parameters() if p.requires_grad)
    value = safe_get_full_optimizer_state(param, "exp_avg")
    safe_set_full_optimizer_state(param, torch.full_like(value, 0.25), "exp_avg")
    assert bool((safe_get_full_optimizer_state(param, "exp_avg") == 0.25).all())
    # Copies and pickles of the optimizer's states are plain ones.
    states = in_files(engine)[0]
    for copied in (copy.deepcopy(states), pickle.loads(pickle.dumps(states)), dict(states)):
        assert type(copied) is dict and torch.equal(copied["exp_avg"], states["exp_avg"])
    with deepspeed.zero.GatheredParameters([param]):
        pass
    before = engine.basic_optimizer.param_groups
    engine.backward(loss_on(engine, 2))
    # ``refused`` keeps the frames of the call for longer.
    with mock.patch.object(engine.basic_optimizer, "step", fail), pytest.raises(RuntimeError, match="this step fails"):
        engine.step()
    assert engine.basic_optimizer.param_groups is before and all(group["params"] for group in before)
    assert len(in_files(engine)) == len(engine.basic_optimizer.state)
    del states, copied
    engine.destroy()
    assert not files_below(folder)
