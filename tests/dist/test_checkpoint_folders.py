"""The folder of a checkpoint: tags that are none, symbolic links, file systems that cannot rename, several writers."""

import argparse
import contextlib
import os
import pathlib
import threading
import time
from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.write import background, file_writer, verify
from deepspeed.zero.optimizers.restore import Restore
from engine_models import loss_on, make_net, saving_engine
from harness import on_ranks, run_ranks
from refusals import refused
from runs import by_rank_0, load_into, take_step, together, weights
from test_checkpoint_crash import mark, marks, save_marked

NO_RENAME = "rename:1+:enosys,exchange:1+:enosys,truncate:1+:enotsup"


BAD_TAGS = ["", " ", ".", "..", "../out", "a/../../out", "a/../b", "a//b", "./a", "/tmp/out", "latest", " a", "a\n",
            "zero_to_fp32.py", ".a.saving", "self"]  # fmt: skip


@on_ranks(2)
def test_tags_that_are_no_folders_of_their_own_are_refused(rank, world, folder):
    folder = os.path.join(folder, "save")
    engine = saving_engine(world, 0)
    mark(engine, 1)
    for tag in ("one", "runs/two", 3.5):
        engine.save_checkpoint(folder, tag=tag)
    if rank == 0:
        os.symlink(".", os.path.join(folder, "self"))
    before = sorted(os.path.join(root, name) for root, _, names in os.walk(os.path.dirname(folder)) for name in names)
    for tag in BAD_TAGS:
        caught = refused(ValueError, "the checkpoint tag", engine.save_checkpoint, folder, tag=tag)
        assert repr(tag) in str(caught)
    by_rank_0(rank, pathlib.Path(folder, "file").touch)
    refused((NotADirectoryError, ValueError), "is a file", engine.save_checkpoint, folder, tag="file")
    by_rank_0(rank, os.unlink, os.path.join(folder, "file"))
    after = sorted(os.path.join(root, name) for root, _, names in os.walk(os.path.dirname(folder)) for name in names)
    assert before == after
    for tag in ("one", "runs/two", 3.5, None):
        assert engine.load_checkpoint(folder, tag=tag)[0] is not None


@on_ranks(2)
def test_links_are_followed_as_often_as_one_likes(rank, world, folder):
    engine = saving_engine(world, 2)
    save_dir = os.path.join(folder, "link")
    by_rank_0(rank, os.symlink, "disk/not/there/yet", save_dir)
    by_rank_0(rank, os.makedirs, os.path.join(folder, "big"))
    for step in (1, 2, 3):
        save_marked(engine, step, save_dir, tag="a")
        if step == 1:
            by_rank_0(rank, os.symlink, os.path.join(folder, "big"), os.path.join(save_dir, "t"))
        engine.save_checkpoint(save_dir, tag="t")
        mark(engine, 9)
        for tag in ("a", "t"):
            path, _ = engine.load_checkpoint(save_dir, tag=tag)
            assert path.startswith(os.path.join(save_dir, tag)) and marks(engine) == [float(step)]
    assert sorted(os.listdir(folder)) == ["big", "disk", "link"]
    assert sorted(os.listdir(save_dir)) == ["a", "latest", "t", "zero_to_fp32.py"]
    assert os.path.islink(os.path.join(save_dir, "t")) and os.path.exists(os.path.join(folder, "big", verify.NAME))
    assert os.path.realpath(save_dir) == os.path.realpath(os.path.join(folder, "disk", "not", "there", "yet"))


@pytest.mark.parametrize("how", [{"write_in_place": True, "writer": {"data_parallel": "REPLICA"}}, {}, {"async": True}])
@on_ranks(2)
def test_in_place(rank, world, how, folder):
    folder = os.path.join(folder, "save")
    os.makedirs(folder, exist_ok=True)
    engine = saving_engine(world, 1, **how)
    file_writer.inject_fault("" if "write_in_place" in how else NO_RENAME)
    for step in (1, 2):
        save_marked(engine, step, folder, tag="t")
        assert marks(load_into(engine, folder)) == [float(step)]
    file_writer.inject_fault("write:1+:enospc," + NO_RENAME)
    mark(engine, 3)
    try:
        with pytest.raises(OSError, match="it was written in place, so what was there is gone"):
            engine.save_checkpoint(folder, tag="t")
            engine.checkpoint_engine.wait()
    finally:
        file_writer.inject_fault("")
    assert "t" not in os.listdir(folder)
    deepspeed.comm.barrier()
    engine.save_checkpoint(folder, tag="t")
    assert marks(load_into(engine, folder)) == [3.0]
    # Torn: without renames it is written like any other file.
    by_rank_0(rank, pathlib.Path(folder, "latest").write_text, "")
    refused(RuntimeError, "latest is empty.*complete are: t", engine.load_checkpoint, folder)
    assert sorted(os.listdir(folder)) == ["latest", "t", "zero_to_fp32.py"]
    assert verify.verify_folder(os.path.join(folder, "t")) == []


def contents(folder):
    return {
        name: (folder / name).read_bytes() for name in os.listdir(folder) if name.endswith(".pt") and "run_" not in name
    }


def body_shared(rank, world, folder, checkpoint, stage):
    engine = saving_engine(world, stage, **checkpoint)
    mark(engine, 1)
    for param in engine.module.parameters():  # values that differ
        param.data.copy_(torch.arange(param.numel(), dtype=param.dtype).reshape(param.shape) / 7)
    written = []

    engine.checkpoint_engine.write_prepared = _noting(engine.checkpoint_engine.write_prepared, written)
    engine.save_checkpoint(folder, tag="t", client_state={"epoch": 3})
    engine.checkpoint_engine.wait()
    deepspeed.comm.barrier()
    expected = [p.detach().clone() for p in engine.module.parameters()]
    mark(engine, 5)
    assert engine.load_checkpoint(folder)[1]["epoch"] == 3
    assert all(torch.equal(a, b) for a, b in zip(expected, engine.module.parameters()))
    return {os.path.basename(path): size for path, size in written}


def _noting(write, written):
    def noting(prepared, path):
        written.append((path, sum(source.bytes for source in prepared.sources)))
        return write(prepared, path)

    return noting


@pytest.mark.parametrize("stage", [0, 1])
def test_ranks_share_the_writing_of_what_all_have(stage, tmp_path):
    alone = run_ranks(2, body_shared, str(tmp_path / "alone"), {}, stage)
    plain, name = contents(tmp_path / "alone" / "t"), "mp_rank_00_model_states.pt"
    assert name in alone[0] and name not in alone[1]
    for how in ({"data_parallel": "REPLICA"}, {"data_parallel": "replica", "decoupled": True}):
        folder = tmp_path / str(len(how))
        parts = [share[name] for share in run_ranks(2, body_shared, str(folder), {"writer": how}, stage)]
        assert sum(parts) == alone[0][name] and all(abs(part - sum(parts) / 2) < 8192 for part in parts)
        assert contents(folder / "t").keys() == plain.keys() and verify.verify_folder(str(folder / "t")) == []
        loaded, other = (torch.load(f / "t" / name) for f in (folder, tmp_path / "alone"))
        assert all(torch.equal(loaded["module"][key], other["module"][key]) for key in other["module"])
    one = run_ranks(2, body_shared, str(tmp_path / "one"), {"writer": {"data_parallel": "MACHINE"}}, stage)
    assert name in one[0] and name not in one[1]  # one host


@on_ranks(2)
def test_shared_files_are_those_of_the_first_rank(rank, world, folder):
    engine = saving_engine(world, 0, writer={"data_parallel": "REPLICA"})
    refused(
        RuntimeError,
        "rank 1: .*has other tensors here than on rank 0: .*data_parallel to null",
        engine.save_checkpoint,
        folder,
        client_state={"mine": torch.ones(rank + 1)},
    )
    engine.save_checkpoint(folder, client_state={"mine": rank})
    assert engine.load_checkpoint(folder)[1]["mine"] == 0


@pytest.mark.parametrize("how", [{}, {"async": True}, {"writer": {"type": "PYTHON"}}])
@on_ranks(2)
def test_files_without_an_archive(rank, world, how, folder, tmp_path):
    engine = saving_engine(world, 2, checkpoint_serialization=False, **how)
    save_marked(engine, 4, folder, tag="t")
    engine.load_checkpoint(folder)
    assert engine.checkpoint_serialization_enabled() is False
    assert marks(engine) == [4.0]
    paths = list((tmp_path / "t").glob("*_states.pt"))
    assert len(paths) == 3 and verify.verify_folder(str(tmp_path / "t")) == []
    for path in paths:
        assert path.read_bytes()[:2] == b"\x80\x02"  # a pickle, and no zip archive
    module = torch.load(tmp_path / "t" / "mp_rank_00_model_states.pt")["module"]
    assert all(bool((module[key] == 4).all()) for key, _ in make_net(seed=0).named_parameters())
    deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)


@on_ranks(2)
def test_ranks_of_a_machine_load_one_after_the_other(rank, world, folder):
    engine = saving_engine(world, 3, zero={"pipeline_loading_checkpoint": True})
    save_marked(engine, 2, folder)
    mark(engine, 7)
    times, real = [], Restore.masters

    def noting(self):
        begin = time.monotonic()
        try:
            return real(self)
        finally:
            threading.Event().wait(0.05)
            times.append((begin, time.monotonic()))

    with mock.patch.object(Restore, "masters", noting):
        engine.load_checkpoint(folder)
    found = marks(engine)
    serial = torch.zeros(1)
    shard = engine.optimizer.state_dict()
    if rank > 0:
        deepspeed.comm.recv(serial, rank - 1)
    with contextlib.suppress(KeyError):
        os.environ.pop("LOCAL_SIZE")
    engine.optimizer.load_state_dict([shard], load_from_fp32_weights=True, load_serial=serial)
    found = together(times[0], found, serial.item())
    for (_, end), (begin, _) in zip([f[0] for f in found], [f[0] for f in found[1:]]):
        assert end <= begin
    assert [f[1] for f in found] == [[2.0]] * 2 and [f[2] for f in found] == [1.0, 2.0]


@on_ranks(1)
def test_loading_in_turn_is_for_stage_3(rank, world, folder):
    engine = saving_engine(world, 2, zero={"pipeline_loading_checkpoint": True})
    engine.save_checkpoint(folder)
    refused(AssertionError, "Only stage3 support for pipeline checkpoint loading", engine.load_checkpoint, folder)
    assert engine.load_checkpoint(folder, load_optimizer_states=False)[0] is not None
    assert background.drain_all() is None


@pytest.mark.parametrize("client", [False, True], ids=["our optimizer", "torch's optimizer"])
@on_ranks(2)
def test_the_elastic_form_goes_on_and_converts(rank, world, client, folder):
    """Saves in the old form, and loads it again and as a universal checkpoint; the run goes on as it would have."""

    def start(elastic, **checkpoint):
        optimizer = (lambda params: torch.optim.AdamW(params, lr=0.01)) if client else None
        return saving_engine(2, 1, {"elastic_checkpoint": elastic}, client=optimizer, **checkpoint)

    def train(engine, seed):
        take_step(engine, loss_on(engine, seed + 10 * rank, 4))
        return list(weights(engine).values())

    engine = start(True)
    train(engine, 1)
    train(engine, 2)
    engine.save_checkpoint(folder, tag="old_form")
    straight = train(engine, 3)
    again = load_into(start(True), folder)
    assert all(map(torch.equal, train(again, 3), straight))
    if rank == 0:
        ds_to_universal.main(argparse.Namespace(
            input_folder=os.path.join(folder, "old_form"), output_folder=os.path.join(folder, "universal")
        ))  # fmt: skip
    deepspeed.comm.barrier()
    universal = load_into(start(False, load_universal=True), folder, tag="universal")
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(train(universal, 3), straight))
