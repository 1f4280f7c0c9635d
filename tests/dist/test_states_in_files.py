"""States of ``torch.optim.AdamW`` and the like rest in files: ``offload_optimizer.device`` nvme."""

import copy
import os
import pickle

import pytest
import torch

import deepspeed
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from deepspeed.zero.optimizers.states_in_files import StatesOfMaster, split_states
from engine_models import batch, loss_of, make_net, train_engine
from harness import on_ranks, run_ranks
from runs import must_raise, take_step
from test_checkpoint_universal import to_universal
from test_offload_optimizer import everything, files_below, make_engine, on, same


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


def body_equal(rank, world, folder, stage, maker, dtype):
    results, more = [], {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    for offload in (None, on(folder, "nvme")):
        engine = engine_of(world, stage, offload, maker, gradient_clipping=0.5, **more)
        losses, norms = train_engine(engine, 4, rank, world)
        if offload is not None:
            assert len(in_files(engine)) == len(engine.basic_optimizer.state)
            assert all(split_states(states, master)[0] for master, states in engine.basic_optimizer.state.items())
            below = os.path.join(folder, f"zero_stage_{stage}", "optimizer", f"rank{rank}")
            assert files_below(below), "states rest in files"
        calls = [group.get("calls") for group in engine.basic_optimizer.param_groups]
        results.append([*everything(engine), torch.tensor(losses), torch.tensor([call or 0 for call in calls])])
        engine.destroy()
    return same(*results)


@pytest.mark.sample
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_every_bit_is_that_of_states_in_memory(tmp_path, world, stage, maker, dtype):
    assert all(run_ranks(world, body_equal, str(tmp_path), stage, maker, dtype))
    assert not files_below(tmp_path), "removed with the engine"


@on_ranks(1)
def test_equals_plain_pytorch(rank, world, folder):
    """Against PyTorch without an engine."""
    torch.manual_seed(0)
    model = make_net()
    plain = copy.deepcopy(model)
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    mine = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    more = {"zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.0}
    engine = make_engine(world, 2, on(folder, "nvme"), model=model, optimizer=mine, **more)
    for step in range(3):
        tokens, targets = batch(step)
        take_step(engine, loss_of(engine(tokens), targets))
        optimizer.zero_grad()
        loss_of(plain(tokens), targets).backward()
        optimizer.step()
    for a, b in zip(engine.module.parameters(), plain.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage, next_stage", [(2, 2), (3, 3), (1, 3)])
@on_ranks(2)
def test_checkpoints(rank, world, stage, next_stage, folder):
    swap, more = os.path.join(folder, "swap"), {"bf16": {"enabled": True}}
    plain = engine_of(world, stage, None, **more)
    train_engine(plain, 4, rank, world)
    first = engine_of(world, stage, on(swap, "nvme"), **more)
    train_engine(first, 3, rank, world)
    first.save_checkpoint(folder, tag="t")
    found = []
    for offload in (on(os.path.join(folder, "other"), "nvme"), None):
        second = engine_of(world, next_stage, offload, **more)
        second.load_checkpoint(folder, tag="t")
        assert bool(in_files(second)) == (offload is not None)
        train_engine(second, 1, rank, world, start=3)
        found.append(everything(second))
        second.destroy()
    assert same(*found)
    if stage == next_stage:
        # What nobody has used has no state there, and zeros in the checkpoint.
        assert all(b is None or torch.equal(a, b) for a, b in zip(found[0], everything(plain), strict=True))


def body_save(rank, world, folder, stage):
    engine = engine_of(world, stage, on(os.path.join(folder, "swap"), "nvme"), bf16={"enabled": True})
    train_engine(engine, 2, rank, world)
    engine.save_checkpoint(folder, tag="t")
    engine.destroy()
    return True


def body_universal(rank, world, folder, stage):
    found = []
    for offload in (None, on(os.path.join(folder, "swap"), "nvme")):
        engine = engine_of(world, stage, offload, bf16={"enabled": True}, checkpoint={"load_universal": True})
        engine.load_checkpoint(folder)
        train_engine(engine, 1, rank, world, start=2)
        found.append(everything(engine))
        engine.destroy()
    return same(*found)


def test_universal_checkpoints(tmp_path):
    run_ranks(2, body_save, str(tmp_path), 2)
    to_universal(tmp_path)
    assert all(run_ranks(2, body_universal, str(tmp_path), 3))


@on_ranks(1)
def test_states_are_read_and_written_by_name(rank, world, folder):
    engine = engine_of(world, 2, on(folder, "nvme"))
    train_engine(engine, 2, rank, world)
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
    engine.basic_optimizer.step, real = _fail, engine.basic_optimizer.step
    tokens, targets = batch(2)
    engine.backward(loss_of(engine(tokens), targets))
    must_raise(RuntimeError, "this step fails", engine.step)
    engine.basic_optimizer.step = real
    assert engine.basic_optimizer.param_groups is before and all(group["params"] for group in before)
    assert len(in_files(engine)) == len(engine.basic_optimizer.state)
    del states, copied
    engine.destroy()
    assert not files_below(folder)


def _fail():
    raise RuntimeError("this step fails")
