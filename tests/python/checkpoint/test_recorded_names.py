"""Names that files say become paths: the C++ function and the one for programs without torch give the same verdict."""

import os
import random

import pytest

from deepspeed.formats import recorded_paths
from deepspeed.host import recorded_names
from places import PYTHON
from processes import run_python
from refusals import refused

WORDS = ["a", "b.c", "..", ".", "", "out", "inner", "sub", "dangling", "loop", "file", "..."]
WORDS += [".h", "\0", "ü", "\udcff", "x" * 260]


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "folder"
    (made / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "victim").write_text("x")
    for link, target in {
        "out": tmp_path / "outside", "inner": "sub", "sub/a": "../inner", "sub/file": "../../outside/victim",
        "file": tmp_path / "outside" / "victim", "dangling": "nothing", "loop": "loop",
    }.items():  # fmt: skip
        os.symlink(target, made / link)
    return made


def verdict(function, *args):
    try:
        return function(*args), None
    except ValueError as error:
        return None, str(error)


def test_both_give_the_same_verdict(folder):
    chance, unfit, taken = random.Random(28), 0, 0
    cases = [None, 3, b"a", "", "/", "/etc", "\ud800", ["a"], "a\nb"]
    cases += ["/".join(chance.choice(WORDS) for _ in range(chance.randrange(1, 5))) for _ in range(3000)]
    for name in cases:
        kind = chance.choice(recorded_names.KINDS)
        native, why = verdict(recorded_paths.path_below, folder, name, "m.json", kind)
        plain, also = verdict(recorded_names.path_below, folder, name, "m.json", kind)
        assert native == plain, (name, kind, why, also)
        if native is None:
            unfit += 1
            assert why.startswith("m.json has the name ") and also.startswith("m.json has the name "), (why, also)
        else:
            taken += 1
            real = os.path.realpath(native)
            assert kind == "tag" or real.startswith(os.path.realpath(folder) + "/"), name
    assert unfit > 500 and taken > 200
    for path_below in (recorded_paths.path_below, recorded_names.path_below):
        refused(ValueError, "path, entry or tag", path_below, folder, "a", "m", "file")


def test_only_regular_files_are_removed_and_opened(folder, tmp_path):
    (folder / "mine").write_text("x")
    os.mkfifo(folder / "pipe")
    for name in ("out/victim", "file", "sub/file", "inner/x", "sub", "pipe", "dangling", "none"):
        assert recorded_paths.remove_below(folder, name, "m") is False
    assert recorded_paths.remove_below(folder, "mine", "m") is True and not (folder / "mine").exists()
    refused(ValueError, "'..'", recorded_paths.remove_below, folder, "../outside/victim", "m")
    for path in (folder / "pipe", folder / "sub", "/dev/zero"):
        refused(OSError, "not a regular file", recorded_names.open_regular, path)
    assert (tmp_path / "outside" / "victim").read_text() == "x"


def test_ds_ckpt_runs_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch')\n")
    (tmp_path / "saves" / "t").mkdir(parents=True)
    (tmp_path / "saves" / "t" / "mp_rank_00_model_states.pt").write_bytes(b"x")
    code = "import sys; from deepspeed.checkpoint.read.cli import main; sys.exit(main(['ls', sys.argv[1]]))"
    done = run_python(code, tmp_path / "saves", PYTHONPATH=f"{tmp_path}{os.pathsep}{PYTHON}")
    assert done.returncode == 0 and "unknown" in done.stdout, done.stderr
