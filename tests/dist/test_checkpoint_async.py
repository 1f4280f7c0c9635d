"""Saves that are copied at once and written while training goes on."""

import contextlib
import json
import os
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint.engines.built_in import AsyncCheckpointEngine, DataStatesCheckpointEngine
from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.write import background, file_writer, verify
from deepspeed.checkpoint.write.background import SnapshotSave
from engine_models import after_steps, net_engine, train_engine
from harness import RankError, on_ranks, run_ranks
from processes import launched
from refusals import refused
from runs import load_into, together
from test_checkpoint_crash import mark, marks, save_marked


def make_engine(world, stage, section=None, model=None, **checkpoint):
    more = {"checkpoint": {"async": True, **checkpoint}} if section is None else section
    return net_engine(world, stage, model=model, **more)


@contextlib.contextmanager
def hold():
    """The background thread writes nothing until it is let go: ``set()`` of the value does that."""
    gate, original = threading.Event(), SnapshotSave._write_one

    def held(self, *args):
        gate.wait(60)
        original(self, *args)

    with mock.patch.object(SnapshotSave, "_write_one", held):
        try:
            yield gate
        finally:
            gate.set()


OTHER_SECTIONS = [  # that ask for it
    {"datastates_ckpt": {"host_cache_size": 1}},
    {"checkpoint": {"writer": {"decoupled": True, "io_buffer_size": 4096, "io_buffer_double": False}}},
]


@pytest.mark.any_device
@pytest.mark.sample("values")
@pytest.mark.parametrize(
    "world, stage, section",
    [
        *((world, stage, None) for world, stage in ((1, 0), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3))),
        *((1, 1, section) for section in OTHER_SECTIONS),
    ],
)
@on_ranks()
def test_what_changes_after_the_save_is_not_in_it(rank, world, stage, section, folder):
    engine = make_engine(world, stage, section)
    assert engine.checkpoint_engine.is_decoupled()
    train_engine(engine, 2, rank, world)
    mark(engine, 7)
    client_state = {"list": [1], "tensor": torch.ones(3)}
    with hold() as gate:
        assert engine.save_checkpoint(folder, client_state=client_state) is True
        left = os.listdir(folder)
        assert "latest" not in left and "global_step7" not in left
        client_state["list"].append(2)
        client_state["tensor"].zero_()
        mark(engine, 8)
        train_engine(engine, 1, rank, world)
        gate.set()
        engine.checkpoint_engine.wait()
    dist.barrier()
    other = make_engine(world, stage, section)
    _, state = other.load_checkpoint(folder)
    assert verify.verify_folder(os.path.join(folder, "global_step7")) == []
    assert (marks(other), other.global_steps) == ([7.0], 7)
    assert (state["list"], state["tensor"].tolist()) == ([1], [1.0] * 3)
    assert not hidden(folder)


def hidden(folder):
    return [name for name in os.listdir(folder) if name.startswith(".")]


@pytest.mark.any_device
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_the_files_are_those_of_a_save_at_once(rank, world, stage, folder):
    engine = after_steps(make_engine(world, stage), 2, rank, world)
    engine.save_checkpoint(os.path.join(folder, "behind"), tag="t")
    synchronous = make_engine(world, stage, {})
    engine.load_checkpoint(os.path.join(folder, "behind"))
    engine.checkpoint_engine = synchronous.checkpoint_engine
    engine.save_checkpoint(os.path.join(folder, "at once"), tag="t")
    files = [verify.read(os.path.join(folder, name, "t"))["files"] for name in ("behind", "at once")]
    assert files[0].keys() == files[1].keys()
    for name, record in files[0].items():
        assert [t["crc32"] for t in record["tensors"] if "run_rank" not in name] == [
            t["crc32"] for t in files[1][name]["tensors"] if "run_rank" not in name
        ]


@pytest.mark.any_device
@pytest.mark.parametrize(
    "world, stage, fault, how",
    [
        (1, 0, "write:1:enospc", "step"),
        (2, 1, "write:2:eio", "step"),
        (2, 3, "open:1:enospc", "step"),
        (2, 2, "fsync:1:eio", "save"),
        (2, 0, "open:1:eio", "save"),
        (2, 2, "write:1:enospc", "load"),
        (2, 1, "write:1:enospc", "wait"),
        (1, 1, "rename:2:eio", "wait"),
        (1, 2, "write:1:eio", "destroy"),
    ],
)
@on_ranks()
def test_a_failure_is_told_to_all_ranks_and_harms_nothing(rank, world, stage, fault, how, folder):
    engine = make_engine(world, stage)
    save_marked(engine, 1, folder, tag="a")
    engine.checkpoint_engine.wait()
    train_engine(engine, 1, rank, world)
    if rank == world - 1:
        file_writer.inject_fault(fault)
    engine.save_checkpoint(folder, tag="b")
    engine.checkpoint_engine.behind.drain()
    file_writer.inject_fault("")
    calls = {
        "step": lambda: train_engine(engine, 1, rank, world),
        "save": lambda: engine.save_checkpoint(folder, tag="c"),
        "load": lambda: engine.load_checkpoint(folder),
        "wait": engine.checkpoint_engine.wait,
        "destroy": engine.destroy,
    }
    error = refused(OSError, None, calls[how])
    told = f"{error.errno} {error}"
    number, words = ("28", "No space") if fault.endswith("enospc") else ("5", "error")
    assert told.startswith(number) and words in told and len(set(together(told))) == 1
    assert f"rank {world - 1}: " in told and "is not saved" in told and "unharmed" in told
    if how != "destroy":
        train_engine(engine, 1, rank, world)  # all ranks are at the same step, so they can go on
    assert [name for name in sorted(os.listdir(folder)) if name not in ("latest", "zero_to_fp32.py")] == ["a"]
    if how != "destroy":
        dist.barrier()
        assert marks(load_into(engine, folder)) == [1.0]
        save_marked(engine, 3, folder, tag="b")
        assert marks(load_into(engine, folder)) == [3.0]


@pytest.mark.slow
@on_ranks(2, timeout=120)
def test_ranks_stop_at_the_same_step(rank, world, folder):
    """The failure comes at any moment of a loop: both ranks must leave it at the same step."""
    engine = make_engine(world, 1)
    told = []
    for trial in range(6):
        with hold() as gate:
            if rank == 1:
                file_writer.inject_fault("write:1:enospc")
            engine.save_checkpoint(folder, tag="a")
            threading.Timer(0.003 * trial * (rank + 1), gate.set).start()
            for step in range(400):
                try:
                    train_engine(engine, 1, rank, world)
                except OSError:
                    told.append(step)
                    break
            else:
                told.append(None)
        file_writer.inject_fault("")
    first, second = together(told)
    assert first == second and None not in first


class Unwilling:
    def __reduce__(self):
        raise TypeError("this object cannot be saved")


@on_ranks(2)
def test_what_cannot_be_pickled_is_told_at_once(rank, world, folder):
    engine = make_engine(world, 1)
    error = refused(
        RuntimeError,
        "rank 0: TypeError: this object cannot be saved",
        engine.save_checkpoint,
        folder,
        tag="t",
        client_state={"x": Unwilling()} if rank == 0 else {},
    )
    assert "is not saved" in str(error)
    dist.barrier()
    assert not hidden(folder)
    engine.save_checkpoint(folder, tag="t")
    engine.checkpoint_engine.wait()
    dist.barrier()
    assert not hidden(folder)


def wide_net():
    return torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 512))


@pytest.mark.any_device
@pytest.mark.parametrize("mib", [None, 16, 20, 6, 1])
@on_ranks(1)
def test_the_cache_is_bounded(rank, world, mib, folder):
    """A model file of 4 MiB and an optimizer file of 12 MiB for each save."""
    gib = None if mib is None else mib / 1024
    engine = make_engine(world, 1, model=wide_net(), host_cache_size=gib)
    cache = engine.checkpoint_engine.cache
    for step in range(1, 5):
        save_marked(engine, step, folder)
        assert cache.limit_bytes is None or cache.held_bytes <= cache.limit_bytes
    engine.checkpoint_engine.wait()
    for step in range(1, 5):
        assert marks(load_into(engine, folder, tag=f"global_step{step}")) == [float(step)]
        assert verify.verify_folder(os.path.join(folder, f"global_step{step}")) == []
    assert cache.limit_bytes == (None if mib is None else mib << 20)
    assert 0 < cache.peak_bytes and (mib is None or cache.peak_bytes <= cache.limit_bytes)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(1)
def test_memory_for_the_first_save_is_there_before_it(rank, world, stage, wide, folder):
    engine = make_engine(world, stage, model=wide_net() if wide else None)
    engine.checkpoint_engine.behind.drain()
    held = engine.checkpoint_engine.cache.held_bytes
    train_engine(engine, 0 if wide else 1, rank, world)
    engine.save_checkpoint(folder, tag="a")
    engine.checkpoint_engine.wait()
    assert held >= max(record["bytes"] for record in verify.read(os.path.join(folder, "a"))["files"].values())
    if wide and stage > 0:  # at stage 0 there are no moments before the first step
        # Each of the files that count has found its block.
        assert engine.checkpoint_engine.cache.held_bytes - held < 1 << 20


@on_ranks(1)
def test_the_next_save_waits_while_the_cache_is_full(rank, world, folder):
    engine = make_engine(world, 1, model=wide_net(), host_cache_size=17 / 1024)
    with hold() as gate:
        engine.save_checkpoint(folder, tag="a")
        threading.Timer(0.5, gate.set).start()
        began = time.monotonic()
        engine.save_checkpoint(folder, tag="b")
        waited = time.monotonic() - began
    engine.checkpoint_engine.wait()
    assert waited > 0.4 and names.latest_tag(folder) == "b"


def body_order(rank, world, folder):
    engine = make_engine(world, 2, keep_last=2)
    with hold() as gate:
        for step in range(1, 6):
            save_marked(engine, step, folder)
        mark(engine, 6)
        early = sorted(os.listdir(folder))
        gate.set()
        engine.checkpoint_engine.wait()
    engine.save_checkpoint(folder, tag="global_step5")  # over one that is there, twice in a row
    save_marked(engine, 7, folder, tag="global_step5")
    engine.load_checkpoint(folder)
    assert not [name for name in early if not name.startswith(".")]
    assert sorted(os.listdir(folder)) == ["global_step4", "global_step5", "latest", "zero_to_fp32.py"]
    assert names.latest_tag(folder) == "global_step5" and marks(engine) == [7.0]


@pytest.mark.any_device
@pytest.mark.parametrize("world", [1, 2])
def test_saves_in_flight_keep_their_order_and_keep_last(world, tmp_path):
    run_ranks(world, body_order, str(tmp_path))


@on_ranks(2)
def test_two_engines_in_one_folder(rank, world, folder):
    engines = [make_engine(world, 1), make_engine(world, 0)]
    for number, engine in enumerate(engines):
        save_marked(engine, number + 1, folder, tag=f"engine{number}", save_latest=False)
        engine.save_checkpoint(folder, tag="common")
    background.drain_all()
    dist.barrier()
    for number, engine in enumerate(engines):
        assert marks(load_into(engine, folder, tag=f"engine{number}")) == [number + 1.0]
    assert len(background._unsettled) == 0
    assert not hidden(folder)


def body_killed(rank, world, folder, fault):
    engine = make_engine(world, 2)
    save_marked(engine, 1, folder, tag="a")
    engine.checkpoint_engine.wait()
    mark(engine, 2)
    if rank == world - 1:
        file_writer.inject_fault(fault)
    engine.save_checkpoint(folder, tag="b")
    engine.checkpoint_engine.wait()


def body_load(rank, world, folder):
    return marks(load_into(make_engine(world, 2), folder))


@pytest.mark.parametrize(
    "world, fault", [(1, "write:1:kill"), (1, "rename:1:kill"), (1, "rename:2:kill"), (2, "write:2:kill")]
)
def test_killed_while_the_background_writes(world, fault, tmp_path):
    began = time.monotonic()
    refused((RankError, OSError), None, run_ranks, world, body_killed, str(tmp_path), fault)
    assert time.monotonic() - began < 50  # nobody waits for a process that is gone
    assert run_ranks(1, body_load, str(tmp_path)) == [[1.0]]
    run_ranks(world, body_killed, str(tmp_path), "")
    assert run_ranks(1, body_load, str(tmp_path)) == [[2.0]]
    assert not hidden(tmp_path)


SCRIPT = """
import os, time
import torch, deepspeed
from deepspeed.checkpoint.write import file_writer
from deepspeed.checkpoint.write.background import SnapshotSave
original = SnapshotSave._write_one
def slow(self, *args):
    time.sleep(0.3)
    original(self, *args)
SnapshotSave._write_one = slow
engine = deepspeed.initialize(
    model=torch.nn.Linear(4, 4),
    config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 1},
            "checkpoint": {"async": True}},
)[0]
if engine.global_rank == 1:
    file_writer.inject_fault(os.environ["FAULT"])
engine.save_checkpoint("out", tag="t")
assert not os.path.exists("out/t")
"""


@pytest.mark.parametrize("fault", ["", "write:1:enospc"])
def test_the_end_of_the_program_waits_for_the_last_save(fault, tmp_path):
    out = launched(SCRIPT, tmp_path, timeout=120, FAULT=fault, OMP_NUM_THREADS="1")
    if fault:
        told = [line for line in (out.stderr + out.stdout).splitlines() if "at the end of the program" in line]
        assert len(told) == 2 and all("rank 1: " in line and "is not saved" in line for line in told)
        assert os.listdir(tmp_path / "out") == []
    else:
        assert out.returncode == 0, out.stderr[-3000:]
        assert (tmp_path / "out" / "latest").read_text() == "t"
        assert verify.verify_folder(str(tmp_path / "out" / "t")) == []


@on_ranks(2)
def test_disks_of_nodes_are_written_at_once(rank, world, folder):
    os.environ["CROSS_RANK"] = str(rank)
    own = os.path.join(folder, f"disk{rank}")
    engine = make_engine(world, 1, use_node_local_storage=True)
    engine.save_checkpoint(own, tag="t")
    assert sorted(os.listdir(own)) == ["latest", "t", "zero_to_fp32.py"]


@on_ranks(1)
def test_datastates_takes_its_own_size(rank, world, folder):
    engine = make_engine(world, 1, {"datastates_ckpt": {"host_cache_size": 2}})
    made = engine.checkpoint_engine
    assert type(made) is DataStatesCheckpointEngine and isinstance(made, AsyncCheckpointEngine)
    assert made.cache.limit_bytes == 2 << 30


def test_the_manifest_tells_when_the_copy_was_made(tmp_path):
    """Retention goes by age, so saves that wait to be written keep the order in which they were asked for."""
    run_ranks(1, body_order, str(tmp_path))
    facts = [json.loads(json.dumps(verify.read(str(tmp_path / f"global_step{n}")))) for n in (4, 5)]
    assert facts[0]["saved_at"] < facts[1]["saved_at"]
