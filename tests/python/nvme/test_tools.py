"""``ds_io``, ``ds_nvme_tune`` and what they print."""

import importlib
import json
import os
import pathlib
import re
import sys

import pytest

from deepspeed import nvme
from deepspeed.config import DeepSpeedConfig
from deepspeed.nvme import perf_run_sweep
from deepspeed.nvme.transfer_rate import bytes_of
from deepspeed.ops.op_builder import AsyncIOBuilder
from places import ROOT
from refusals import refused

SPACE = {"block_size": ["64K", "256K"], "queue_depth": [4], "overlap_events": [True, "false"], "io_parallel": [1, 2]}


@pytest.fixture
def sweep(tmp_path):
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(SPACE))
    folder = tmp_path / "nvme"
    folder.mkdir()
    return ["--nvme_dir", str(folder), "--sweep_config", str(path), "--io_size", "1M", "--loops", "1",
            "--log_dir", str(tmp_path / "logs")]  # fmt: skip


def test_sizes():
    assert [bytes_of(text) for text in ("1", "4K", "400M", "2g", "1MB", "1MiB", 7)] == [
        1, 4096, 400 << 20, 2 << 30, 1 << 20, 1 << 20, 7,
    ]  # fmt: skip
    for text in ("", "0", "-1", "1.5G", "x"):
        refused(ValueError, "is not a size", bytes_of, text)


def test_tuning_ends_with_a_section_that_works_as_printed(sweep, tmp_path, capsys):
    perf_run_sweep.main(sweep)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("best read: ") and lines[1].startswith("best write: ")
    assert all(" GB/s with {" in line for line in lines[:2])
    section = json.loads("\n".join(lines[2:]))
    # The configuration reads every key of it, and a handle takes them as they are.
    config = DeepSpeedConfig({"train_batch_size": 1, **section})
    assert {key: getattr(config.aio_config, key) for key in section["aio"]} == section["aio"]
    handle = AsyncIOBuilder().load().aio_handle(**section["aio"])
    assert handle.get_intra_op_parallelism() == section["aio"]["intra_op_parallelism"] in (1, 2)
    assert handle.get_block_size() in (64 << 10, 256 << 10)
    for line in lines[:2]:
        AsyncIOBuilder().load().aio_handle(**json.loads(line[line.index("{") :]))
    assert len(os.listdir(tmp_path / "logs")) == 16 and not os.listdir(tmp_path / "nvme")


def test_the_published_functions(sweep, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["ds_nvme_tune", *sweep, "--no_write", "--verbose"])
    args = nvme.parse_sweep_arguments()
    nvme.sweep_main(args)
    assert capsys.readouterr().out.count("read ") == 8
    assert set(nvme.generate_main(args.log_dir)["aio"]) == {
        "block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism",
    }  # fmt: skip
    assert "best write" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, text",
    [
        ({"--nvme_dir": "/none"}, "/none is not a folder"),
        ({"--sweep_config": '{"num_threads": [1]}'}, "'num_threads' is nothing to tune"),
        ({"--io_size": "1000T"}, "bytes free"),
        ({"--io_size": "x"}, "'x' is not a size"),
    ],
)
def test_bad_input_ends_with_one_line(sweep, tmp_path, capsys, change, text):
    for flag, value in change.items():
        if flag == "--sweep_config":
            (tmp_path / "other.json").write_text(value)
            value = str(tmp_path / "other.json")
        sweep[sweep.index(flag) + 1] = value
    assert perf_run_sweep.main(sweep) == 1 and text in capsys.readouterr().err


def test_a_published_key_without_effect_is_named(tmp_path, capsys):
    path = tmp_path / "published.json"
    space = {"block_size": ["1M"], "queue_depth": [4], "sequential_requests": [True, False], "io_parallel": [1]}
    path.write_text(json.dumps(space))
    assert len(perf_run_sweep.settings_of(str(path))) == 2  # overlap_events
    said = capsys.readouterr().err
    assert said.count("sequential_requests has no effect here") == 1 and str(path) in said


def test_nothing_to_generate(tmp_path):
    refused(ValueError, "nothing measured", nvme.generate_main, str(tmp_path))


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--read", "--validate"],
        ["--read", "--handle", "--single_submit", "--sequential_requests", "--io_parallel", "2"],
        ["--unlocked", "--block_size", "64K", "--queue_depth", "2"],
    ],
    ids=" ".join,
)
def test_ds_io(tmp_path, capsys, flags):
    out_file, folder = tmp_path / "out.json", tmp_path / "files"
    folder.mkdir()
    nvme.ds_io_main(["--folder", str(folder), "--io_size", "1M", "--loops", "2", "--json", str(out_file), *flags])
    operation = "read" if "--read" in flags else "write"
    assert f"{operation} speed: " in capsys.readouterr().out
    result = json.loads(out_file.read_text())
    assert result["op"] == operation and len(result["processes"][0]) == 2 and result["gb_per_s"] > 0
    assert not os.listdir(folder)


@pytest.mark.slow
def test_ds_io_in_several_processes(tmp_path, capsys):
    mapping = ["--folder_to_device_mapping", f"{tmp_path}:0", f"{tmp_path}:1"]
    nvme.ds_io_main([*mapping, "--io_size", "1M", "--loops", "1"])
    out = capsys.readouterr().out
    assert "process 1: " in out and "write speed" in out


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--folder", "x", "--use_gds"],
        ["--folder_to_device_mapping", "x"],
        ["--folder", "x", "--io_size", "1.5"],
        ["--folder", "x", "--loops", "0"],
    ],
    ids=" ".join,
)
def test_ds_io_refuses(flags):
    assert refused(SystemExit, "", nvme.ds_io_main, flags).code == 2


def test_installed_programs(monkeypatch, capsys):
    """The console scripts of setup.py name functions that are there; --help needs no folder and no drive."""
    scripts = dict(re.findall(r'"(ds_\w+) = ([\w.:]+)"', pathlib.Path(ROOT, "setup.py").read_text(encoding="utf-8")))
    assert {"ds_io", "ds_nvme_tune"} < set(scripts)
    for name in ("ds_io", "ds_nvme_tune"):
        module, function = scripts[name].split(":")
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        ended = refused(SystemExit, "", getattr(importlib.import_module(module), function))
        assert ended.code == 0 and capsys.readouterr().out.startswith(f"usage: {name} ")
