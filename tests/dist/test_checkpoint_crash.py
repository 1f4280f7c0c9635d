"""A save that is killed or fails at any point leaves a checkpoint that loads: the old one or the new one, whole."""

import os

import pytest
import torch

import deepspeed
from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.read import cli
from deepspeed.checkpoint.write import file_writer, verify
from engine_models import saving_engine
from harness import on_ranks, run_ranks
from refusals import refused
from runs import load_into, raised, weights


def mark(engine, value):
    """Weights and masters that say which save they are from."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        with torch.no_grad():
            for param in engine.module.parameters():
                param.fill_(value)
    if hasattr(engine.optimizer, "refresh_fp32_params"):
        engine.optimizer.refresh_fp32_params()
    engine.global_steps = value


def save_marked(engine, value, folder, **options):
    """Saves after ``mark``."""
    mark(engine, value)
    return engine.save_checkpoint(folder, **options)


def marks(engine):
    """The marks that an engine's weights hold: one where a checkpoint is whole."""
    return sorted({float(v) for weight in weights(engine).values() for v in weight.reshape(-1).tolist()})


def body_first(rank, world, folder, stage):
    save_marked(saving_engine(world, stage), 1, folder, tag="a")


def body_second(rank, world, folder, stage, tag, victim):
    engine = saving_engine(world, stage)
    mark(engine, 2)
    if rank != victim:
        file_writer.inject_fault("")
    engine.save_checkpoint(folder, tag=tag)


def body_load(rank, world, folder, stage):
    engine = saving_engine(world, stage)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    assert marks(engine) == [float(engine.global_steps)]
    return engine.global_steps


def kill_everywhere(folder, world, stage, tag, operation, points):
    """Kills rank ``world - 1`` at its n-th ``operation`` of the second save. Returns what loads afterwards, per n."""
    loaded = []
    for n in points:
        run_ranks(world, body_first, folder, stage)
        fault = {"DS_IO_FAULT": f"{operation}:{n}:kill"}
        error = raised(run_ranks, world, body_second, folder, stage, tag, world - 1, env=fault)
        steps = run_ranks(world, body_load, folder, stage)
        assert len(set(steps)) == 1
        assert not any(verify.verify_folder(entry.folder) for entry in cli.checkpoints_of(folder))
        loaded.append(steps[0])
        if error is None:
            assert steps[0] == 2
            return loaded
    return loaded


# With a real engine, a sample; tests/python/checkpoint/test_commit.py kills at every step on every kind of file system.
STEPS = [("rename", "a"), ("fsync", "b"), ("open", "a"), ("write", "b")]
OTHER_STEPS = [("write", "a"), ("fsync", "a"), ("open", "b"), ("rename", "b")]


@pytest.mark.sample("values")
@pytest.mark.slow
@pytest.mark.parametrize(
    "operation, tag",
    STEPS + [pytest.param(*step, marks=pytest.mark.every("the same with the other tag")) for step in OTHER_STEPS],
)
def test_killed_at_every_step(operation, tag, tmp_path):
    loaded = kill_everywhere(str(tmp_path), 1, 2, tag, operation, range(1, 60))
    assert loaded[0] == 1 and loaded[-1] == 2 and loaded == sorted(loaded)
    assert len(loaded) > 2
    assert [name for name in os.listdir(tmp_path) if name.endswith((".saving", ".removing"))] == []


@pytest.mark.parametrize("operation, n", [("open", 1), ("write", 2), ("fsync", 2)])
def test_a_killed_rank_leaves_the_old_one(operation, n, tmp_path):
    assert kill_everywhere(str(tmp_path), 2, 3, "b", operation, [n]) == [1]


@pytest.mark.sample("values")
@pytest.mark.parametrize("fault", ["write:1:enospc", "write:2:eio", "fsync:1:eio", "open:2:enospc"])
@pytest.mark.parametrize("world, stage", [(1, 0), (2, 1), (2, 3)])
@on_ranks()
def test_an_error_is_told_to_all_ranks_and_harms_nothing(rank, world, stage, fault, folder):
    engine = saving_engine(world, stage)
    save_marked(engine, 1, folder, tag="a")
    mark(engine, 2)
    if rank == world - 1:
        file_writer.inject_fault(fault)
    error = refused(OSError, None, engine.save_checkpoint, folder, tag="b")
    text = f"{error.errno} {error}"
    file_writer.inject_fault("")
    left = sorted(os.listdir(folder))
    old = marks(load_into(engine, folder))
    save_marked(engine, 3, folder, tag="b")
    engine.load_checkpoint(folder)
    number, words = ("28", "No space") if fault.endswith("enospc") else ("5", "error")
    assert text.startswith(number) and words in text
    assert f"rank {world - 1}: " in text and ("states.pt" in text or "state.pt" in text)
    assert "is not saved" in text and "unharmed" in text
    assert [name for name in left if name not in ("latest", "zero_to_fp32.py")] == ["a"]
    assert old == [1.0] and marks(engine) == [3.0]


@on_ranks(2)
def test_keep_last(rank, world, folder):
    engine = saving_engine(world, 1, keep_last=2)
    for step in range(1, 6):
        save_marked(engine, step, folder, save_latest=step != 5)
    os.makedirs(os.path.join(folder, "mine"), exist_ok=True)
    save_marked(engine, 6, folder)
    assert sorted(os.listdir(folder)) == ["global_step5", "global_step6", "latest", "mine", "zero_to_fp32.py"]


@on_ranks(1)
def test_files_of_others_in_the_folder_stay(rank, world, folder, tmp_path):
    engine = saving_engine(world, 0)
    engine.save_checkpoint(folder, tag="t")
    (tmp_path / "t" / "tokenizer").mkdir()
    for name in ("config.json", "tokenizer/vocab.txt", "zero_pp_rank_7_mp_rank_00_optim_states.pt"):
        (tmp_path / "t" / name).write_text(name)
    engine.save_checkpoint(folder, tag="t")
    engine.save_checkpoint(folder, tag="t")
    found = {
        os.path.relpath(os.path.join(root, f), tmp_path / "t") for root, _, fs in os.walk(tmp_path / "t") for f in fs
    }
    # Also a shard that no rank has written: the manifest does not list it.
    assert {"config.json", "tokenizer/vocab.txt", "zero_pp_rank_7_mp_rank_00_optim_states.pt", verify.NAME} < found
    assert (tmp_path / "t" / "tokenizer" / "vocab.txt").read_text() == "tokenizer/vocab.txt"


def body_truncated(rank, world, folder, mode):
    saving_engine(world, 2, verify_on_load=mode).load_checkpoint(folder)


def test_damage_is_found_before_anything_is_loaded(tmp_path):
    folder = str(tmp_path)
    run_ranks(2, body_first, folder, 2)
    path = names.OPTIM_STATES.path(os.path.join(folder, "a"), dp_rank=1)
    tensor = verify.read(os.path.join(folder, "a"))["files"][os.path.basename(path)]["tensors"][0]
    data = bytearray(open(path, "rb").read())
    data[tensor["offset"] + tensor["bytes"] // 2] ^= 4
    open(path, "wb").write(data)
    run_ranks(2, body_truncated, folder, "sizes")
    refused(
        RuntimeError,
        r"zero_pp_rank_1_mp_rank_00_optim_states\.pt: tensor '.*differ",
        run_ranks,
        2,
        body_truncated,
        folder,
        "all",
    )
    open(path, "wb").write(data[:-100])
    refused(
        RuntimeError,
        r"zero_pp_rank_1_mp_rank_00_optim_states\.pt is damaged: it has \d+ bytes",
        run_ranks,
        2,
        body_truncated,
        folder,
        "sizes",
    )
