"""Copies of one save: memory of several files once, the engine's own states late, and what waits for them."""

import ctypes
import threading
import time

import pytest
import torch

import deepspeed
from deepspeed.checkpoint import snapshot as snapshots
from deepspeed.checkpoint.engine_states import EngineStates
from deepspeed.checkpoint.engines.async_engine import AsyncCheckpointEngine
from deepspeed.checkpoint.host_cache import HostCache
from deepspeed.checkpoint.kinds import prepare
from deepspeed.checkpoint.snapshot import MemoryRanges, Snapshot
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

MIB = 1 << 20


def sources(**tensors):
    return prepare("state.pt", tensors).sources


def contents(copies):
    return [b"".join(ctypes.string_at(*piece) for piece in source.pieces(None)) for source in copies.sources]


def raw(tensor):
    return tensor.contiguous().numpy().tobytes()


class States:
    """Stands for ``EngineStates``: the memory of ``tensors``."""

    def __init__(self, *tensors):
        self.log = []
        self._ranges = MemoryRanges()
        for tensor in tensors:
            self._ranges.add(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def cover(self, address, bytes):
        return self._ranges.find(address, bytes) is not None

    def hold(self):
        self.log.append("hold")

    def let_go(self):
        self.log.append("let go")

    def check_unchanged(self):
        pass


def test_ranges():
    ranges = MemoryRanges()
    for start, bytes in ((100, 50), (10, 20), (200, 1)):
        ranges.add(start, bytes, f"from {start}")
    assert ranges.find(100, 50) == (100, "from 100") and ranges.find(149, 1) == (100, "from 100")
    assert ranges.find(10, 20) == (10, "from 10") and ranges.find(200, 1) == (200, "from 200")
    for address, bytes in ((9, 1), (9, 5), (29, 2), (30, 1), (149, 2), (99, 3), (200, 2), (500, 1)):
        assert ranges.find(address, bytes) is None, address


def test_memory_of_two_files_is_copied_once():
    flat = torch.arange(3 * MIB, dtype=torch.float32)
    whole, part, other = flat[:MIB], flat[1000:2000], torch.ones(1000)
    expected = [raw(whole), raw(part), raw(other)]
    cache = HostCache()
    snapshot = Snapshot(cache)
    first = snapshot.add(sources(whole=whole))
    second = snapshot.add(sources(part=part, other=other))
    held = cache.held_bytes
    assert held < 4 * MIB + 200_000  # the part is where the whole is
    flat.zero_(), other.zero_()
    assert contents(first) + contents(second) == expected
    snapshot.start_late_copies()
    first.give_back()
    taken = cache.take(4 * MIB)  # not the block that the second file needs as well
    taken.memory.fill_(1)
    assert contents(second) == expected[1:]
    second.give_back()
    assert cache.take(4 * MIB).memory.data_ptr() != taken.memory.data_ptr() and cache.held_bytes == held + taken.bytes


def test_states_are_copied_late(monkeypatch):
    weight, state = torch.randn(1000), torch.randn(2000)
    expected = [raw(weight), raw(state)]
    states = States(state)
    snapshot = Snapshot(HostCache(), states)
    copies = snapshot.add(sources(weight=weight, state=state))
    weight.zero_()
    go, made = threading.Event(), snapshots._copy
    monkeypatch.setattr(snapshots, "_copy", lambda *args: (go.wait(10), made(*args)))
    snapshot.start_late_copies()
    assert states.log == ["hold"]
    go.set()
    copies.wait()
    assert contents(copies) == expected
    deadline = time.monotonic() + 10
    while len(states.log) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert states.log == ["hold", "let go"]


def test_a_full_cache_gets_its_room_back_from_late_copies():
    # The second file waits for the first one's memory, which is written when its late copies are made.
    first, second = torch.randn(MIB // 4), torch.randn(MIB // 4)
    expected = [raw(first), raw(second)]
    snapshot = Snapshot(HostCache(MIB + 65536), States(first, second))
    copies = snapshot.add(sources(first=first))

    def write():
        copies.wait()
        found.append(contents(copies)[0])
        copies.give_back()

    found = []
    writer = threading.Thread(target=write)
    writer.start()
    others = snapshot.add(sources(first=first, second=second)[1:])
    writer.join(10)
    snapshot.start_late_copies()
    others.wait()
    assert found + contents(others) == expected
    assert snapshot.add(sources(large=torch.zeros(MIB))) is None


def test_a_late_copy_that_fails_is_told(monkeypatch):
    state = torch.randn(100)
    states = States(state)
    snapshot = Snapshot(HostCache(), states)
    copies = snapshot.add(sources(state=state))

    def fail(*args):
        raise RuntimeError("no memory")

    monkeypatch.setattr(snapshots, "_copy", fail)
    snapshot.start_late_copies()
    with pytest.raises(RuntimeError, match="no memory"):
        copies.wait()
    while len(states.log) < 2:
        time.sleep(0.001)


def test_dropped_copies_do_not_wait():
    state = torch.randn(100)
    snapshot = Snapshot(HostCache(), States(state))
    copies = snapshot.add(sources(state=state))
    snapshot.drop()
    with pytest.raises(RuntimeError, match="given up"):
        copies.wait()


# ---- the engine's side -----------------------------------------------------------------------------------------------
def make_engine(stage=2, bf16=True, client_optimizer=False):
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    config["bf16"] = {"enabled": bf16}
    if client_optimizer:
        config["zero_allow_untested_optimizer"] = True
        return deepspeed.initialize(
            model=model, config=config, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1)
        )[0]
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1}}
    return deepspeed.initialize(model=model, config=config)[0]


def train(engine, steps=1):
    dtype = next(engine.module.parameters()).dtype
    for step in range(steps):
        engine.backward(engine(torch.full((2, 8), 0.1 * (step + 1), dtype=dtype)).square().mean())
        engine.step()


def meets(function):
    """Whether ``function()`` ends within 0.2 s; it goes on in its thread otherwise."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(0.2)
    return thread, not thread.is_alive()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("client_optimizer", [False, True])
def test_what_changes_states_waits_for_the_copies(stage, client_optimizer):
    engine = make_engine(stage, client_optimizer=client_optimizer)
    train(engine)
    weight = engine.module[0].weight
    name = "exp_avg"
    one = torch.ones_like(safe_get_full_fp32_param(weight))
    saved = engine.optimizer.state_dict()
    writes = {
        "step": lambda: train(engine),
        "masters": lambda: safe_set_full_fp32_param(weight, one),
        "states": lambda: safe_set_full_optimizer_state(weight, one, name),
        "handed out": lambda: engine.core.masters(),
        "loaded": lambda: engine.optimizer.load_state_dict(saved),
    }
    if stage == 3:
        writes["gathered"] = lambda: gather_and_write(weight)
    for what, write in writes.items():
        engine.core.hold_states()
        try:
            thread, ended = meets(write)
            assert not ended, what
        finally:
            engine.core.let_states_go()
            thread.join(10)
        assert not thread.is_alive(), what
    engine.core.hold_states()
    assert meets(lambda: safe_get_full_optimizer_state(weight, name))[1] or client_optimizer
    engine.core.let_states_go()
    engine.destroy()


def gather_and_write(weight):
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.add_(1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_which_memory_is_the_engines_own(stage, bf16):
    engine = make_engine(stage, bf16)
    train(engine)
    states = EngineStates(engine)

    def covered(tensor):
        return states.cover(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    assert all(covered(tensor) for slot in range(2) for tensor in engine.core.slots(slot))
    own_masters = bf16 or stage == 3
    assert all(covered(tensor) == own_masters for tensor in engine.core.masters())
    assert not any(covered(param) for param in engine.module.parameters() if param.numel())
    engine.core.slots(0)[0].add_(1)
    with pytest.raises(RuntimeError, match="checkpoint_engine.wait"):
        states.check_unchanged()
    engine.destroy()


def test_a_step_between_does_not_reach_the_file(tmp_path, monkeypatch):
    engine = make_engine()
    engine.checkpoint_engine = AsyncCheckpointEngine()
    train(engine, 2)
    weight = engine.module[0].weight
    expected = [safe_get_full_fp32_param(weight).clone(), safe_get_full_optimizer_state(weight, "exp_avg").clone()]
    made = snapshots._copy
    monkeypatch.setattr(snapshots, "_copy", lambda *args: (time.sleep(0.2), made(*args)))
    engine.save_checkpoint(str(tmp_path))
    train(engine, 2)  # the first of them waits
    engine.load_checkpoint(str(tmp_path))
    found = [safe_get_full_fp32_param(weight), safe_get_full_optimizer_state(weight, "exp_avg")]
    assert all(torch.equal(one, other) for one, other in zip(expected, found))
    engine.destroy()


def test_states_that_somebody_else_writes_to_are_told(tmp_path, monkeypatch):
    engine = make_engine()
    engine.checkpoint_engine = AsyncCheckpointEngine()
    train(engine)
    engine.save_checkpoint(str(tmp_path), tag="good")
    engine.checkpoint_engine.wait()
    made = snapshots._copy
    monkeypatch.setattr(snapshots, "_copy", lambda *args: (time.sleep(0.2), made(*args)))
    moment = next(iter(engine.basic_optimizer.state.values()))["exp_avg"]
    engine.save_checkpoint(str(tmp_path), tag="torn")
    moment.zero_()
    with pytest.raises(RuntimeError, match="torn.*written to, by other means"):
        engine.checkpoint_engine.wait()
    assert (tmp_path / "latest").read_text() == "good" and not (tmp_path / "torn").exists()
    engine.destroy()
