"""The folder into which a conversion to a universal checkpoint writes: its own files alone, and the output is whole or
as it was."""

import os
import pathlib

import pytest
import torch

import megatron_files
from deepspeed.checkpoint import autoep_universal, ds_to_universal
from deepspeed.checkpoint.convert import universal
from deepspeed.checkpoint.layouts.saved_universal import UniversalState
from deepspeed.checkpoint.write import commit, file_writer, verify
from hostile_folders import rename_key
from refusals import refused
from test_universal_convert import convert


@pytest.fixture
def source(tmp_path):
    megatron_files.write(str(tmp_path / "step7"), 1, 1, 2)
    return tmp_path / "step7"


def tree(folder):
    """path -> content of everything below ``folder``."""
    paths = pathlib.Path(folder).rglob("*")
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in paths}


def put_users_files(folder):
    for path in ("tmp/mine.txt", "zero/mine.txt", "zero/mine/notes.pt", "tmp/a/b", "notes.txt"):
        os.makedirs(os.path.dirname(folder / path), exist_ok=True)
        (folder / path).write_text(path)
    return tree(folder)


@pytest.mark.parametrize("lacks", ["", "exchange:1+:einval", "rename_dir:1+:exdev,exchange:1+:einval"])
def test_files_of_the_user_in_the_output_stay(lacks, source, tmp_path):
    mine = put_users_files(tmp_path / "universal")
    before = tree(source)
    if "rename_dir" in lacks:  # written in place: nothing may have the name of the shards
        for path in ("tmp/a/b", "tmp/a", "tmp/mine.txt", "tmp"):
            mine.pop(path)
        os.rename(tmp_path / "universal" / "tmp", tmp_path / "moved")
    for _ in range(2):  # the second time over an earlier result
        file_writer.inject_fault(lacks)
        convert(source, tmp_path / "universal")
        now = tree(tmp_path / "universal")
        assert mine.items() <= now.items() and tree(source) == before
        assert "zero/layers.0.scale/exp_avg.pt" in now and ("tmp" in now) == ("tmp" in mine)
        assert verify.read(tmp_path / "universal")["universal"] is True
        assert verify.verify_folder(tmp_path / "universal") == []
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_of_an_earlier_result_nothing_is_left_over(source, tmp_path):
    convert(source, tmp_path / "universal", keep_temp_folder=True)
    assert (tmp_path / "universal" / "tmp" / "layers.0.scale" / "0" / "fp32.00").exists()
    (tmp_path / "universal" / "zero" / "layers.0.scale" / "old.pt").write_text("the user's")
    os.rename(tmp_path / "universal" / verify.NAME, tmp_path / "manifest")
    convert(source, tmp_path / "universal")  # without a manifest: as earlier versions wrote it
    assert not (tmp_path / "universal" / "zero" / "layers.0.scale" / "old.pt").exists()
    assert (tmp_path / "universal" / "tmp" / "layers.0.scale").exists()  # nobody says whose these are
    os.rename(tmp_path / "universal" / "zero" / "layers.0.scale", tmp_path / "universal" / "zero" / "gone")
    (tmp_path / "universal" / "zero" / "gone" / "mine.txt").write_text("mine")
    convert(source, tmp_path / "universal")
    assert (tmp_path / "universal" / "zero" / "gone" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("step", ["extract", "merge", "common"])
def test_an_earlier_result_stays_until_the_new_one_is_whole(step, source, tmp_path, monkeypatch):
    convert(source, tmp_path / "universal")
    before = tree(tmp_path)
    original = getattr(universal.Conversion, step)

    def failing(self, *args):
        if step == "common" or args[0][0] == "layers.0.scale":
            raise OSError(28, "no space")
        return original(self, *args)

    monkeypatch.setattr(universal.Conversion, step, failing)
    refused(OSError, "no space", convert, source, tmp_path / "universal")
    assert tree(tmp_path) == before
    refused(OSError, "no space", convert, source, tmp_path / "another")
    assert tree(tmp_path) == before


def test_outputs_that_are_or_hold_or_lie_in_the_source_are_refused(source, tmp_path):
    os.makedirs(tmp_path / "d")
    os.rename(source, tmp_path / "d" / "tmp")
    os.symlink(tmp_path / "d" / "tmp", tmp_path / "link")
    before = tree(tmp_path)
    for given, output, why in (
        ("d/tmp", "d/tmp", "are both"), ("d/tmp", "link", "are both"), ("link", "d/tmp", "are both"),
        ("d/tmp", "d", "holds --input_folder"), ("link", "d", "holds"), ("d/tmp", ".", "holds"),
        ("d/tmp", "d/tmp/universal", "lies in --input_folder"), ("d/tmp", "link/zero/x", "lies in"),
    ):  # fmt: skip
        refused(ValueError, why, convert, tmp_path / given, tmp_path / output)
    (tmp_path / "file").write_text("mine")
    refused(NotADirectoryError, "is a file", convert, tmp_path / "d" / "tmp", tmp_path / "file")
    (tmp_path / "file").unlink()
    assert tree(tmp_path) == before
    convert(tmp_path / "d" / "tmp", tmp_path / "d" / "universal")  # beside it
    assert (tmp_path / "d" / "latest_universal").read_text() == "universal"


@pytest.mark.parametrize(
    "bad", ["../../../escaped", "{base}/escaped", "..", ".", "a/b", "", "a\0b", "x/../../../../escaped"]
)
def test_names_in_a_checkpoint_do_not_leave_the_output(bad, source, tmp_path):
    bad = bad.format(base=tmp_path)
    for old in ("layers.0.scale", "exp_avg"):
        hostile = tmp_path / old
        megatron_files.write(str(hostile), 1, 1, 2)
        rename_key(str(hostile), old, bad)
        before = tree(tmp_path)
        if bad in ("..", ".", "") and old == "exp_avg":
            continue  # '...pt' and '.pt' are names like any other
        refused(ValueError, "has the name", convert, hostile, tmp_path / "universal")
        assert tree(tmp_path) == before


def test_helpers_check_names_too(tmp_path):
    value = torch.ones(2)
    for name, state in (("../out", "fp32"), ("p", "../../out"), (str(tmp_path / "x"), "fp32")):
        shard = (str(tmp_path / "tmp"), name, 0, state, 0, value)
        refused(ValueError, "has the name", ds_to_universal.write_shard, *shard)
        refused(ValueError, "has the name", autoep_universal._save, str(tmp_path / "out"), name, state, value, 1)
    assert os.listdir(tmp_path) == []


def test_honest_names_with_dots_and_blanks_convert(tmp_path):
    params = {name: torch.ones(size) for name, size in {"a.b.c": 3, "..a": 2, "x...y": 2, "a b": 1, "ü": 1}.items()}
    source = tmp_path / "step"
    os.makedirs(source)
    torch.save(
        {"module": {}, "param_shapes": [{name: value.shape for name, value in params.items()}]},
        source / "mp_rank_00_model_states.pt",
    )
    flat = torch.cat(list(params.values()))
    inner = {
        "zero_stage": 1,
        "partition_count": [1],
        "single_partition_of_fp32_groups": [flat],
        "base_optimizer_state": {"state": {0: {"exp.avg": flat, "step": 3}}, "param_groups": [{"params": [0]}]},
    }
    torch.save({"optimizer_state_dict": inner}, source / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    convert(source, tmp_path / "universal")
    saved = UniversalState(str(tmp_path / "universal"))
    assert set(saved.shapes) == set(params) and saved.state_names() == ["exp.avg"]
    for name in params:
        found = torch.load(tmp_path / "universal" / "zero" / name / "exp.avg.pt", weights_only=False)
        assert torch.equal(found["param"].reshape(-1), params[name])


def test_keep_last_leaves_a_universal_checkpoint_alone(source, tmp_path):
    convert(source, tmp_path / "universal")
    for number in range(3):
        folder = str(tmp_path / f"step{number}")
        commit.finish(folder, commit.begin(folder), {"tag": f"step{number}", "saved_at": 10.0 + number}, {})
    commit.retire(str(tmp_path), 1, "step2")
    folders = sorted(name for name in os.listdir(tmp_path) if (tmp_path / name).is_dir())
    assert folders == ["step2", "step7", "universal"]
