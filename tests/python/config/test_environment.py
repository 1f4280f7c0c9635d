"""Keys that an environment variable overrides, and how it is told."""

import pytest

from deepspeed.config import DeepSpeedConfigError, cli
from deepspeed.config.config import DeepSpeedConfig, resolve
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from refusals import refused

KEY = "zero_optimization.audit_steps"


def steps(audit_steps=None):
    section = {} if audit_steps is None else {"audit_steps": audit_steps}
    native = resolve({"train_batch_size": 8, "zero_optimization": section})[0]
    return native, native.values()["zero_optimization"]["audit_steps"], native.origins().get(KEY, ("default",))


def test_the_variable_overrides_the_file(monkeypatch):
    monkeypatch.delenv("DS_AUDIT", raising=False)
    assert steps()[1:] == (0, ("default",)) and steps(3)[1:] == (3, ("given", 0, ""))
    for text in ("5", "5e0"):
        monkeypatch.setenv("DS_AUDIT", text)
        assert steps(None)[1:] == steps(3)[1:] == (5, ("environment", 0, "DS_AUDIT"))
    monkeypatch.setenv("DS_AUDIT", "")
    assert steps(3)[1] == 3


def test_it_switches_off_what_the_file_switches_on(monkeypatch):
    monkeypatch.setenv("DS_AUDIT", "0")
    made = DeepSpeedConfig({"train_batch_size": 8, "zero_optimization": {"audit_steps": 3}})
    assert made.zero_config.audit_steps == 0


@pytest.mark.parametrize("text, words", [("x", "must be an integer"), ("-1", "at least 0"), ("true", "an integer")])
def test_wrong_values_name_the_variable(monkeypatch, text, words):
    monkeypatch.setenv("DS_AUDIT", text)
    refused(DeepSpeedConfigError, f"DS_AUDIT = .*{KEY}.*{words}", DeepSpeedConfig, {"train_batch_size": 8})


def test_explain_tells_the_variable(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("DS_AUDIT", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    cli.main(["explain", str(tmp_path / "ds.json")])
    rows = {line.split()[0]: line.split(None, 2)[1:] for line in capsys.readouterr().out.splitlines() if "  " in line}
    assert rows[KEY][0] == "2" and rows[KEY][1].startswith("environment: DS_AUDIT")
    assert rows["train_micro_batch_size_per_gpu"][1].startswith("environment: ")
    assert "WORLD_SIZE" in rows["train_micro_batch_size_per_gpu"][1]


def test_sections_by_themselves_are_not_overridden(monkeypatch):
    monkeypatch.setenv("DS_AUDIT", "2")
    assert DeepSpeedZeroConfig().audit_steps == 0 and DeepSpeedZeroConfig(audit_steps=1).audit_steps == 1


def test_docs_and_schema_name_it():
    assert "The environment variable `DS_AUDIT` overrides it." in cli._C.config.docs()
    assert '"x-ds-environment": "DS_AUDIT"' in cli._C.config.json_schema("training")
    assert cli._C.config.environment_variables("training") == {"DS_AUDIT": KEY, "DS_COMM_TIMEOUT_S": "comm.timeout"}
    assert cli._C.config.environment_variables("inference") == {}
