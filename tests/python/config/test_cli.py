"""ds_config: explain, diff, schema, docs."""

import json
import pathlib

import pytest

from deepspeed.config import cli
from places import ROOT
from refusals import refused

FILE = """{
  "train_batch_size": 64,
  "gradient_accumulation_steps": 4,
  "bf16": {"enabled": true},
  "zero_optimization": {
    "reduce_bucket_size": "auto",
    "stage3_gather_fp16_weights_on_model_save": true
  }
}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(FILE)
    return str(path)


def test_docs_are_fresh():
    """After a change of a Field: `make docs`."""
    docs = pathlib.Path(ROOT, "docs", "config.md").read_text(encoding="utf-8")
    assert docs == cli._C.config.docs(), "docs/config.md is stale: run `make docs`"


def test_explain_tells_value_and_origin_of_every_key(file, capsys):
    assert cli.main(["explain", file, "--world", "2"]) == 0
    text = capsys.readouterr().out
    rows = {line.split()[0]: line.split(None, 2)[1:] for line in text.splitlines() if len(line.split(None, 2)) == 3}
    assert text.startswith("Data-parallel ranks: 2 (--world)")
    assert rows["train_batch_size"] == ["64", "line 2"]
    micro, origin = rows["train_micro_batch_size_per_gpu"]
    assert micro == "8" and origin == "derived: the other batch sizes and 2 data-parallel ranks (--world)"
    assert rows["gradient_clipping"] == ["1.0", "default"]
    assert rows["zero_optimization.reduce_bucket_size"] == ["500000000", 'default, "auto" on line 6']
    where = "deprecated name zero_optimization.stage3_gather_fp16_weights_on_model_save, line 7"
    assert rows["zero_optimization.stage3_gather_16bit_weights_on_model_save"][1].startswith(where)
    assert rows["amp.enabled"] == ["false", "default; known, not built yet: apex amp"]
    assert "No conflicts." in text
    assert len(rows) > 350


def test_explain_shows_conflicts_with_their_lines(tmp_path, capsys):
    path = tmp_path / "ds.json"
    lines = ['"train_batch_size": 9', '"train_micro_batch_size_per_gpu": 2']
    lines += ['"fp16": {"enabled": true}', '"bf16": {"enabled": true}']
    path.write_text("{\n" + ",\n".join(lines) + "\n}")
    assert cli.main(["explain", str(path), "--world", "4"]) == 1
    text = capsys.readouterr().out
    conflicts = text[text.index("Conflicts") :]
    assert "fp16.enabled = true (line 4), bf16.enabled = true (line 5)" in conflicts
    assert "train_batch_size on line 2, train_micro_batch_size_per_gpu on line 3" in conflicts
    assert "Choose train_batch_size 8 or 16" in conflicts


def test_diff(file, tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text(FILE.replace("64", "128"))
    assert cli.main(["diff", file, str(other)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "train_batch_size: 64 -> 128",
        "train_micro_batch_size_per_gpu: 16 -> 32",
    ]
    assert cli.main(["diff", file, file]) == 0


def test_schema_is_what_editors_take(tmp_path):
    path = tmp_path / "schema.json"
    assert cli.main(["schema", "-o", str(path)]) == 0
    schema = json.loads(path.read_text())
    assert schema["additionalProperties"] is True
    zero = schema["properties"]["zero_optimization"]
    assert zero["additionalProperties"] is False
    assert zero["properties"]["stage"]["anyOf"] == [{"type": ["integer"], "enum": [0, 1, 2, 3]}, {"const": "auto"}]
    assert zero["properties"]["prefetch_bucket_size"]["default"] == 50000000


def test_schema_judges_like_the_engine():
    schema = json.loads(cli._C.config.json_schema("training"))
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema)
    assert validator.is_valid(json.loads(FILE)) and not validator.is_valid({"zero_optimization": {"stge": 1}})
    assert not validator.is_valid({"fp16": {"loss_scale": -1}})


def test_what_cannot_be_read(tmp_path, capsys):
    assert cli.main(["explain", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
    assert cli.main(["docs", "-o", str(tmp_path / "no" / "folder.md")]) == 2
    refused(SystemExit, "", cli.main, [])
