"""The programs beside the launcher: ds_ssh, ds_elastic, ds_bench, and the names that setup.py gives them."""

import json
import os
import re
import runpy
import sys

import pytest
import setuptools

from deepspeed.comm import bench
from deepspeed.elasticity import cli
from deepspeed.launcher import on_hosts
from deepspeed.registry import load_target
from places import ROOT
from processes import write_program


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    write_program(tmp_path / "bin" / "ssh", 'shift 3\nexport ON="$1"; shift; exec sh -c "$*"\n', "#!/bin/bash\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "hosts").write_text("h1.invalid slots=2\nlocalhost slots=1\n")
    return str(tmp_path / "hosts")


def test_ds_ssh_runs_a_command_everywhere(hosts, capfd):
    assert on_hosts.main(["-f", hosts, 'echo "on $ON"; printf last']) == 0
    said = sorted(capfd.readouterr().out.splitlines())
    assert said == ["h1.invalid: last", "h1.invalid: on h1.invalid", "localhost: last", "localhost: on "]
    assert on_hosts.main(["-f", hosts, "printf", "%s|", "a b", "$ON"]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["h1.invalid: a b|$ON|", "localhost: a b|$ON|"]


def test_ds_ssh_says_what_failed(hosts, capfd, tmp_path):
    assert on_hosts.main(["-f", hosts, 'test -z "$ON" || exit 7']) == 7
    assert "ds_ssh: h1.invalid: exit code 7" in capfd.readouterr().err
    assert on_hosts.main(["-f", hosts]) == 2 and on_hosts.main(["-f", str(tmp_path / "none"), "true"]) == 1
    (tmp_path / "bad").write_text("h1\n")
    assert on_hosts.main(["-f", str(tmp_path / "bad"), "true"]) == 1
    assert "line 1" in capfd.readouterr().err


def test_ds_elastic(tmp_path, capsys):
    section = {"enabled": True, "max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32,
               "max_gpus": 1500, "version": 0.1}  # fmt: skip
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"elasticity": section}))
    assert cli.main(["-c", str(file)]) == 0
    said = capsys.readouterr().out
    assert "final_batch_size .... 9792" in said and "valid_gpus .......... [32, 34" in said
    assert "micro_batch_size ...." not in said
    assert cli.main(["-c", str(file), "-w", "64"]) == 0
    said = capsys.readouterr().out
    assert "micro_batch_size .... 17" in said and "accumulation steps .. 9" in said
    assert cli.main(["-c", str(file), "-w", "65"]) == 1 and "nearest" in capsys.readouterr().err
    assert cli.main(["-c", str(tmp_path / "none")]) == 1
    assert cli.main(["-c", str(file), "-w", "-4"]) == 1 and "world_size is -4" in capsys.readouterr().err
    section |= {"min_gpus": 8, "num_gpus_per_node": 8, "model_parallel_size": 4, "version": 0.2}
    file.write_text(json.dumps({"elasticity": section}))
    assert cli.main(["-c", str(file), "-w", "16"]) == 0
    said = capsys.readouterr().out
    batch, micro, steps = (int(re.search(rf"{name} \.+ (\d+)", said)[1]) for name in ("final_batch_size",
                           "micro_batch_size", "accumulation steps"))  # fmt: skip
    assert batch == micro * steps * 4  # 16 ranks are 4 copies of the model


def test_ds_bench_starts_ranks_unless_it_is_one(monkeypatch):
    """Also inside of a job, when a flag asks for ranks: they get no such flag, and nothing of the outer job."""
    started, measured = [], []
    monkeypatch.setattr(bench.subprocess, "call", lambda line, env: started.append((line, env)) or 7)
    monkeypatch.setattr(bench, "measure", measured.append)
    start = [sys.executable, "-m", "deepspeed.launcher", "-q", "--module", "--no_local_rank"]
    for name in ("RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert bench.main(["--scan", "--maxsize", "3"]) == 7
    assert started.pop()[0] == [*start, "deepspeed.comm.bench", "--scan", "--maxsize", "3"]
    monkeypatch.setenv("MASTER_PORT", "29600")
    assert bench.main(["-H", "hosts"]) == 7 and started[0][1]["MASTER_PORT"] == "29600"
    assert started.pop()[0] == [*start, "--hostfile=hosts", "deepspeed.comm.bench"]
    monkeypatch.setenv("RANK", "0")
    assert bench.main(["--num_gpus", "2", "--raw"]) == 7
    line, env = started.pop()
    assert line == [*start, "--num_accelerators=2", "deepspeed.comm.bench", "--raw"]
    assert "RANK" not in env and "MASTER_PORT" not in env and not measured
    assert bench.main(["--raw"]) == 0 and len(measured) == 1 and not started


def test_programs_and_extras_of_the_package(monkeypatch):
    said = {}
    monkeypatch.setattr(setuptools, "setup", said.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    programs = dict(line.split(" = ") for line in said["entry_points"]["console_scripts"])
    published = "deepspeed deepspeed.pt ds ds_ssh ds_report dsr ds_bench ds_elastic ds_nvme_tune ds_io".split()
    assert set(published) <= set(programs) and all(callable(load_target(target)) for target in programs.values())
    assert said["extras_require"]["1bit_adam"] == ["mpi4py"] and "mpi4py" in said["extras_require"]["all"]
