"""Configurations of real repositories are accepted, each with the right answer."""

import json

import pytest
from real_configs import REAL

from deepspeed.config import cli
from deepspeed.config.config import resolve


def at(values, path):
    for key in path.split("."):
        values = values[key]
    return values


@pytest.mark.parametrize("name, config, right", REAL, ids=[item[0] for item in REAL])
def test_accepted_with_the_right_answer(name, config, right, tmp_path, capsys):
    native = resolve(config, world_size=1)[0]
    issues = native.issues()
    errors = [issue for issue in issues if issue["severity"] == "error"]
    left = {path for issue in errors if issue["code"] == "left_to_trainer" for path in issue["paths"]}
    assert [issue for issue in errors if issue["code"] != "left_to_trainer"] == []
    assert left == set(right["left"])
    warned = [issue["text"] for issue in issues if issue["severity"] == "warning"]
    assert len(warned) == (right["told"] is not None) and all(right["told"] in text for text in warned), warned
    assert not any(issue["code"] == "no_effect" for issue in issues)
    for path, value in right["values"].items():
        found = at(native.values(), path)
        assert found == value and type(found) is type(value)

    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    assert cli.main(["explain", str(path), "--world", "1"]) == 0
    text = capsys.readouterr().out
    assert ("Filled in by the trainer" in text) == bool(left) and "No conflicts" in text


def test_there_are_at_least_60():
    assert len(REAL) >= 60 and len({name for name, *_ in REAL}) == len(REAL)


@pytest.mark.parametrize(
    "key", ["fp61", "bf61", "fp_16", "zero_optimisation", "optimiser", "gradient_cliping", "gradient_accumulation_step"]
)
def test_typing_errors_of_keys_are_still_refused(key):
    issues = resolve({"train_batch_size": 8, key: {}}, world_size=1)[0].issues()
    assert any(issue["severity"] == "error" and "Did you mean" in issue["suggestion"] for issue in issues)


def test_suggestions_name_what_was_meant():
    issues = resolve({"train_batch_size": 8, "fp16": {"enabled": True, "type": "x"}}, world_size=1)[0].issues()
    (issue,) = [issue for issue in issues if issue["severity"] == "error"]
    assert "optimizer.type" not in issue["suggestion"] and "loss_scale" in issue["suggestion"]
