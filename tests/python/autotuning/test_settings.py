"""The settings of the user: the configuration in its forms, ranges, mapped arguments; and refusals."""

import base64
import json
import os

import pytest

from deepspeed.autotuning import Autotuner
from deepspeed.autotuning.scheduler import ResourceManager
from deepspeed.autotuning.space import base_and_ranges
from deepspeed.launcher.arguments import parse_args
from places import PYTHON
from processes import run_python, succeeded
from refusals import refused
from tuners import MBS, by_formula, tuner_of

MAPPED = {f"{MBS} ": " --bs", "gradient_accumulation_steps": "--gas", "zero_optimization.overlap_comm": "--overlap"}


@pytest.mark.parametrize("form", ["file", "equals", "deepspeed", "json", "base64", "dict"])
def test_forms_of_the_configuration(form, tmp_path):
    config = {
        MBS: 2,
        "autotuning": {"enabled": True, "arg_mappings": {MBS: "--bs"}},
    }
    path, text = tmp_path / "ds.json", json.dumps(config)
    path.write_text(text)
    coded = base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")
    given = {
        **{"file": ["--deepspeed_config", str(path)], "equals": [f"--deepspeed_config={path}"]},
        **{"deepspeed": ["--deepspeed", str(path)], "json": ["--deepspeed", "--deepspeed_config", text]},
        **{"base64": ["--deepspeed_config", coded], "dict": ["--deepspeed_config", config]},
    }[form]
    args = parse_args(["--autotuning", "tune", "train.py", "--bs=1", "-x", "1"])
    args.user_args += given
    tuner = Autotuner(args, {"localhost": [0]})
    assert tuner.user_config == config
    words = tuner.rm.script_arguments({MBS: 8}, "/new/ds.json")
    assert words[:3] == ["--bs=8", "-x", "1"] and len(words) == 3 + len(given)
    if form in ("file", "equals", "deepspeed"):
        assert words[3:] == [*given[:-1], given[-1].replace(str(path), "/new/ds.json")]
    else:
        assert json.loads(base64.urlsafe_b64decode(words[-1])) == {MBS: 8}


def test_mapped_arguments_follow_the_configuration(tmp_path):
    config = {MBS: "auto", "gradient_accumulation_steps": "auto", "autotuning": {"arg_mappings": MAPPED}}
    config["zero_optimization"] = {"stage": 1, "overlap_comm": "auto", "reduce_bucket_size": "auto"}
    config["optimizer"] = {"type": "Adam", "params": {"lr": "auto"}}
    tuner = tuner_of(tmp_path, config, extra=["--bs", "4", "--gas", "3", "--overlap=1"])
    assert (tuner.get_val_from_user_args(MBS), tuner.get_val_from_user_args("fp16")) == ("4", None)
    assert tuner.get_gas_from_user_config() == 3
    base, ranges = base_and_ranges(tuner)
    assert base["zero_optimization"] == {"overlap_comm": 1, "stage": 1}, "the script's value; the default of the key"
    assert base["optimizer"]["params"]["lr"] == "auto" and ranges["gradient_accumulation_steps"] == [3]
    made = {MBS: 8, "gradient_accumulation_steps": 2, "zero_optimization": {"overlap_comm": True}}
    words = tuner.rm.script_arguments(made, "new.json")
    assert words[:5] == ["--bs", "8", "--gas", "2", "--overlap=True"] and words[-1] == "new.json"
    tuner = tuner_of(tmp_path, {"train_batch_size": 8, "autotuning": {"arg_mappings": {"train_batch_size": "-tbs"}}})
    assert tuner.rm.script_arguments({"train_batch_size": 8}, "a")[-2:] == ["-tbs", "8"]


def test_a_mapped_batch_size_follows_the_micro_batch(tmp_path):
    config = {MBS: [1, 4], "zero_optimization": {"stage": 0}, "gradient_accumulation_steps": 3}
    config["autotuning"] = {"arg_mappings": {"train_batch_size": "-tbs"}}
    tuner = by_formula(tmp_path, config, lambda config: config["train_batch_size"])
    tuner.tune()
    assert tuner.optimal_ds_config["train_batch_size"] == 24 == tuner._best[1]


def test_lists_and_all_are_ranges_and_values_that_are_lists_are_none(tmp_path):
    config = {
        "optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.95]}},
        "zero_optimization": {"stage": "all", "overlap_comm": "all", "reduce_bucket_size": [1000, 2000]},
        "pipeline": {"schedule": ["1f1b", "gpipe"]},
        "comms_logger": {"prof_ops": ["all_reduce"]},
        MBS: [2, 4],
    }
    base, ranges = base_and_ranges(tuner_of(tmp_path, config))
    assert base["optimizer"] == config["optimizer"] and base["comms_logger"] == config["comms_logger"]
    assert ranges == {
        **{"zero_optimization.overlap_comm": [False, True], "zero_optimization.reduce_bucket_size": [1000, 2000]},
        **{"pipeline.schedule": ["1f1b", "gpipe"], "zero_optimization.stage": [0, 1, 2, 3]},
        **{MBS: [2, 4], "gradient_accumulation_steps": [1]},
    }
    assert base_and_ranges(tuner_of(tmp_path, {"zero_optimization": True}))[1]["zero_optimization.stage"] == [1]


@pytest.mark.parametrize(
    "hosts, nodes, slots",
    [
        ({"worker-0": [0, 1, 2, 3]}, 1, 4),
        ({"worker-0": [0], "worker-1": [0, 1, 2], "worker-2": [0, 1, 2]}, 3, 1),
        ({"worker-0": [0, 1], "worker-2": [4, 5]}, 2, 2),
    ],
)
def test_published_constructors(hosts, nodes, slots, tmp_path):
    tuner = tuner_of(tmp_path, {}, hosts, options=())
    assert (tuner.exp_num_nodes, tuner.exp_num_gpus) == (nodes, slots)
    smaller = tuner_of(tmp_path, {}, hosts, options=("--num_gpus", "1", "--num_nodes", "1"))
    assert (smaller.exp_num_nodes, smaller.exp_num_gpus, smaller.rm.slots) == (1, 1, hosts)
    for mappings in (None, {}, MAPPED):
        manager = ResourceManager(None, "worker-0, worker-1", 4, None, None, mappings)
        assert manager.arg_mappings == {key.strip(): flag.strip() for key, flag in (mappings or {}).items()}
        assert manager.slots == {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1, 2, 3]}


REFUSED = {
    "metric": (
        {"metric": "sped"},
        "metric is 'sped'; it is one of: latency, throughput.* Did you mean 'step'",
    ),
    "no key": ({"metrik": "flops"}, "autotuning.metrik is not a key .* Did you mean 'metric'"),
    "kind": ({"fast": 1}, "autotuning.fast is 1; it is a value of the kind boolean"),
    "number": ({"tuner_num_trials": 0}, "autotuning.tuner_num_trials is 0; it is a value of the kind integer above 0"),
    "least": ({"tuner_early_stopping": -1}, "autotuning.tuner_early_stopping is -1"),
    "off": ({"enabled": False}, "autotuning.enabled is false, and the launcher got --autotuning"),
    "steps": ({"start_profile_step": 5}, "end_profile_step must be above start_profile_step"),
    "folder": ({"exps_dir": ""}, "autotuning.exps_dir is empty"),
    "mapped key": (
        {"arg_mappings": {"train_mbs": "--bs"}},
        "arg_mappings: 'train_mbs' is not a key of the configuration",
    ),
    "mapped flag": (
        {"arg_mappings": {MBS: "bs"}},
        "is mapped to 'bs', which is not an argument of the script: write --bs",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_section_is_refused(name, tmp_path):
    section, words = REFUSED[name]
    refused(ValueError, words, tuner_of, tmp_path, {"autotuning": section})


def test_other_bad_input_is_refused(tmp_path):
    for flag, key in (
        ("--per_device_train_batch_size", MBS),
        ("--gradient-accumulation-steps", "gradient_accumulation"),
    ):
        words = f"the script gets {flag}, and the tuner changes {key}.*: say so by autotuning.arg_mappings"
        refused(ValueError, words, tuner_of, tmp_path, {}, extra=[flag, "4"])
    tuner_of(tmp_path, {"autotuning": {"arg_mappings": {MBS: f"--{MBS}"}}}, extra=[f"--{MBS}=4"])
    args = parse_args(["--autotuning", "tune", "train.py", "--deepspeed_config"])
    refused(ValueError, "needs the configuration among the arguments", Autotuner, args, {"a": [0]})
    for text, words in (("no-such.json", "is neither a JSON file"), ("[1]", "is neither|holds a list")):
        args = parse_args(["--autotuning", "tune", "train.py", "--deepspeed_config", text])
        refused(ValueError, words, Autotuner, args, {"a": [0]})
    for config, words in (
        ({"zero_optimization": {"overlap_comm": []}}, "zero_optimization.overlap_comm is an empty list"),
        ({"zero_optimization": {"reduce_bucket_size": "all"}}, 'reduce_bucket_size is "all", and it takes any integer'),
        ({"gradient_accumulation_steps": "many"}, "gradient_accumulation_steps is 'many'; it is a number from 1 on"),
    ):
        refused(ValueError, words, by_formula(tmp_path, config, lambda config: 1.0).tune)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for key in ("results_dir", "exps_dir"):
        tuner = tuner_of(tmp_path, {"autotuning": {key: str(tmp_path / "file" / "below")}})
        refused(ValueError, f"autotuning.{key}: .*file.*Name a folder that can be written to", tuner.tune)


@pytest.mark.parametrize("overwrite", [True, False])
def test_only_experiments_of_an_earlier_search_are_removed(overwrite, tmp_path):
    config = {MBS: [1], "zero_optimization": {"stage": 0}, "autotuning": {"overwrite": overwrite}}
    config["autotuning"] |= {"results_dir": str(tmp_path), "exps_dir": str(tmp_path)}
    (tmp_path / "thesis").write_text("mine")
    (tmp_path / "written").write_text("mine, too")
    for expected in (2, 2 if overwrite else 0):
        tuner = by_formula(tmp_path, config, lambda config: 1.0)
        tuner.tune()
        assert len(tuner.rm.ran) == expected and (tmp_path / "thesis").read_text() == "mine"
        assert (tmp_path / "written").read_text() == "mine, too"


def test_the_tuner_needs_no_torch(tmp_path):
    code = """
import sys
sys.modules["torch"] = None
from deepspeed.autotuning import Autotuner
from deepspeed.autotuning.scheduler import ResourceManager
from deepspeed.autotuning.utils import get_val_by_key
"""
    succeeded(run_python(code, PYTHONPATH=PYTHON))
    assert os.path.isdir(tmp_path)
