"""The quickstart as a user starts it, with a model small enough for a test."""

import csv
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys

import pytest

from sampling import every_case

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
QUICKSTART = os.path.join(ROOT, "examples", "quickstart")
pytestmark = [pytest.mark.slow, pytest.mark.dist]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The quickstart's own configuration with a shorter schedule."""
    settings = json.loads(pathlib.Path(QUICKSTART, "ds_config.json").read_text(encoding="utf-8"))
    settings["scheduler"]["params"].update(total_num_steps=20, warmup_num_steps=5)
    settings["train_micro_batch_size_per_gpu"] = 2
    path = tmp_path_factory.mktemp("config") / "ds_config.json"
    path.write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def whole(cache, config, tmp_path_factory):
    """An uninterrupted run: its folder and what it said."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, train(cache, config, out)


def train(cache, config, out, *options, ranks=2):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--num_accelerators",
        str(ranks),
        "--master_port",
        str(port),
    ]
    command += [
        os.path.join(QUICKSTART, "train.py"),
        "--deepspeed_config",
        str(config),
        "--out",
        str(out),
        "--cache",
        str(cache),
    ]
    command += ["--layers", "1", "--heads", "2", "--width", "64", *options]
    env = {**os.environ, "PYTHONPATH": os.path.join(ROOT, "python"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def rows(out):
    with open(out / "metrics.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def curve(out):
    return [(row["step"], row["loss"], row["lr"], row["grad_norm"]) for row in rows(out)]


def test_trains_and_shows_what_came_of_it(whole):
    out, text = whole
    before, after = map(float, re.search(r"held-out loss\s+([\d.]+) before\s+([\d.]+) after", text).groups())
    assert after < before
    assert [row["step"] for row in rows(out)] == ["5", "10", "15", "20"]
    assert re.search(r"step +20/20  loss .* tokens/s  memory \d+ \+ \d+ MB  ETA 0:00", text)
    assert "a sample" in text and (out / "sample.txt").read_text().startswith("class")
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert os.listdir(out / "checkpoints").count("global_step20") == 1


def test_it_begins_anew_goes_on_and_goes_on_at_another_number_of_ranks(cache, config, whole, tmp_path):
    """--restart removes our files and no others; an interrupted run ends like an uninterrupted one; a finished one
    goes on."""
    out = tmp_path / "out"
    shutil.copytree(whole[0], out)
    (out / "mine.txt").write_text("keep")
    assert "resumed" not in train(cache, config, out, "--steps", "10", "--restart")
    assert (out / "mine.txt").read_text() == "keep"
    assert [row["step"] for row in rows(out)] == ["5", "10"]

    train(cache, config, out, "--resume")
    assert curve(out) == curve(whole[0])
    assert (out / "sample.txt").read_text() == (whole[0] / "sample.txt").read_text()

    for ranks in (1, 2, 3) if every_case() else (3,):
        more = tmp_path / f"on {ranks}"
        shutil.copytree(out, more)
        text = train(cache, config, more, "--more", "5", ranks=ranks)  # nobody to ask: it goes on
        assert "There is a checkpoint at step 20 of 20" in text and "resumed at step 20, on to 25" in text
        assert [row["step"] for row in rows(more)] == ["5", "10", "15", "20", "25"]
        assert sorted(os.listdir(more / "checkpoints")) == ["global_step25", "latest"]
