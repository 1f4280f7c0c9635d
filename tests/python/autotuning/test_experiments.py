"""Experiments of the launcher, with a script that writes metrics from a formula: how they end, what is run again."""

import json
import os
import re
import signal
import subprocess
import time

import pytest

from tuners import MBS, launched

# Counts its starts in the file ``runs``: one line for each, with the port where ranks meet.
SCRIPT = """
import argparse, json, os, sys, time
parser = argparse.ArgumentParser()
for name in ("--deepspeed_config", "--local_rank", "--bs"):
    parser.add_argument(name)
args = parser.parse_args()
config = json.load(open(args.deepspeed_config))
section, size = config["autotuning"], config["train_micro_batch_size_per_gpu"]
stage = config["zero_optimization"]["stage"]
first = os.environ["RANK"] == "0"
if first:
    path = section.get("metric_path") or section["model_info_path"]
    name = os.path.basename(os.path.dirname(path))
    with open("runs", "a") as file:
        file.write(f"{name} {os.environ['MASTER_PORT']} {time.time()}\\n")
print("error: an error that is only a word", file=sys.stderr)
if "metric_path" not in section:
    if first:
        json.dump({"num_params": 10}, open(path, "w"))
    sys.exit(0)
%s
if first:
    value = size / (1 + stage + size / 4)
    json.dump({section["metric"]: value}, open(path + ".x", "w"))
    os.replace(path + ".x", path)
"""
GRID = {MBS: [1, 2, 4], "zero_optimization": {"stage": [0, 1]}}


def rows(folder):
    with open(folder / "runs") as file:
        return [line.split() for line in file]


def finished(process, code=0):
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, (out, err)
    return out, err


def table(text):
    """{experiment: the words behind it} of the summary."""
    lines = (line.split() for line in text.splitlines())
    return {words[0]: words[4:] for words in lines if words and re.match(r"z\d_gas", words[0])}


@pytest.mark.slow
def test_exit_codes_and_metrics_decide(tmp_path):
    code = """
if stage == 1:
    sys.stderr.write("Traceback\\nValueError: wrong stage\\n")
    sys.exit(5)
if size == 1:
    os.kill(os.getpid(), 9)
if size == 2:
    time.sleep(60)
"""
    config = {
        **GRID,
        "autotuning": {"arg_mappings": {MBS: "--bs"}, "experiment_timeout": 12, "tuner_early_stopping": 0},
    }
    out, err = finished(launched(tmp_path, config, SCRIPT % code, how="run"), 1)
    found = table(out)
    assert found["z0_gas1_tmbspg4"] == ["2"] and len(found) == 6
    assert found["z0_gas1_tmbspg1"][0] == "memory:"
    assert " ".join(found["z0_gas1_tmbspg2"]) == "timeout after 12 s (autotuning.experiment_timeout)"
    assert {" ".join(found[f"z1_gas1_tmbspg{size}"]) for size in (1, 2, 4)} == {"exit code 5: ValueError: wrong stage"}
    assert re.search(r"^Tuning completed in 0:\d\d:\d\d\.\d+\. Total number of experiments: 6\.$", out, re.M)
    results = tmp_path / "results"
    assert {"cmd.txt", "ds_config.json", "exp.json", "metrics.json", "stdout.log", "stderr.log"} <= set(
        os.listdir(results / "z0_gas1_tmbspg4")
    )
    assert "only a word" in (results / "z0_gas1_tmbspg4" / "stderr.log").read_text()
    assert (results / "profile_model_info" / "model_info.json").exists()
    assert (tmp_path / "exps" / "z1_gas1_tmbspg2.json").exists() and (results / "summary.txt").exists()
    command = (results / "cmd_optimal.txt").read_text()
    assert command.startswith("deepspeed --num_gpus=2 train.py") and "--bs 4" in command
    assert f"--deepspeed_config {results}/ds_config_optimal.json" in command
    assert "autotuning: deepspeed --num_gpus=2 train.py" in out
    assert "KeyError: 'autotuning'" in err, "the job that it starts then has no such section"


@pytest.mark.slow
def test_a_script_without_metrics_is_one_clear_error(tmp_path):
    process = launched(tmp_path, GRID, SCRIPT % "sys.exit(0)")
    _, err = finished(process, 1)
    last = err.strip().splitlines()[-1]
    assert last.startswith("deepspeed: error: autotuning: the script wrote no metrics.json and ended with exit code 0.")
    assert "at least 5 steps with an engine of deepspeed.initialize" in last
    assert [row[0] for row in rows(tmp_path)] == ["profile_model_info", "z0_gas1_tmbspg4"]


@pytest.mark.slow
def test_free_slots_run_experiments_at_once_each_with_a_port_of_its_own(tmp_path):
    (tmp_path / "hosts").write_text("localhost slots=4\n")
    options = ["--num_gpus", "2", "--hostfile", str(tmp_path / "hosts"), "--master_port", "29876"]
    wait = "time.sleep(3)"
    finished(launched(tmp_path, {**GRID, "autotuning": {"tuner_early_stopping": 0}}, SCRIPT % wait, options=options))
    runs = [(port, float(start)) for name, port, start in rows(tmp_path) if name != "profile_model_info"]
    assert len(runs) == 6 and {port for port, _ in runs} == {"29876", "29877"}
    for (port, start), (other, second) in zip(runs[::2], runs[1::2], strict=True):
        assert port != other and abs(second - start) < 3, "the second one starts while the first one runs"


@pytest.mark.slow
def test_a_search_that_is_killed_goes_on_and_runs_nothing_twice(tmp_path):
    """Killed behind the facts about the model, inside of experiments and between two of them, at five places."""
    config = {**GRID, "autotuning": {"overwrite": False, "tuner_early_stopping": 0, "tuner_type": "model_based"}}
    script, done = SCRIPT % "time.sleep(0.3)", tmp_path / "results"
    killed = []
    for place in range(5):
        process = launched(tmp_path, config, script)
        wanted = place + 1
        while len(ended(done)) < wanted:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        time.sleep(0.12 * place)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed.append(ended(done))
        end = time.monotonic() + 30
        while subprocess.run(["pgrep", "-f", str(done)], capture_output=True).stdout:
            assert time.monotonic() < end, "what it had started ends with it"
            time.sleep(0.05)
        starts = len(rows(tmp_path))
    out, _ = finished(launched(tmp_path, config, script))
    assert len(table(out)) == 6 and "Total number of experiments: 6." in out
    names = [row[0] for row in rows(tmp_path)]
    for before in killed:
        for name in before:
            assert names.count(name) <= 1 + sum(name not in each for each in killed), name
    twice = {name for name in names if names.count(name) > 1}
    assert all(any(name not in each for each in killed) for name in twice), "only what was interrupted runs again"
    first = {name: min(i for i, each in enumerate(killed) if name in each) for name in set().union(*killed)}
    for name, place in first.items():
        assert names.count(name) <= 1 + place
    # Nothing is left to do, and a changed configuration is another experiment.
    finished(launched(tmp_path, config, script))
    assert len(rows(tmp_path)) == len(names) > starts
    finished(launched(tmp_path, {**config, "steps_per_print": 7}, script))
    assert len(rows(tmp_path)) == len(names) + 7


def ended(folder):
    """Names of the experiments whose end is known."""
    found = set()
    for name in os.listdir(folder) if folder.exists() else ():
        try:
            with open(folder / name / "exp.json") as file:
                if "exit_code" in json.load(file):
                    found.add(name)
        except (OSError, ValueError):
            pass
    return found
