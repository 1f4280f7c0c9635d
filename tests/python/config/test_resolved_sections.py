"""Sections of a configuration whose other parts are not filled in yet."""

import json

import pytest

from deepspeed import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.config.getters import resolved_sections
from refusals import refused

# The configuration that a trainer passes on while the model is built: transformers fills in the rest when training
# begins.
BLANKS = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "override_module_apply": False},
    "bf16": {"enabled": "auto"},
}


def test_blanks_elsewhere_are_not_looked_at(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(BLANKS))
    for config in (BLANKS, str(tmp_path / "ds.json")):
        found = resolved_sections(config, ["zero_optimization", "bf16"])
        assert list(found) == ["zero_optimization", "bf16"]
        assert found["zero_optimization"]["stage"] == 3 and not found["zero_optimization"]["override_module_apply"]
        assert found["zero_optimization"]["reduce_bucket_size"] == 500000000  # the default
        assert found["bf16"]["enabled"] is False


def test_other_spellings_and_parsed_configurations():
    assert resolved_sections({"bfloat16": {"enabled": True}}, ["bf16"])["bf16"]["enabled"] is True
    parsed = DeepSpeedConfig({"train_batch_size": 1, "fp16": {"enabled": True}})
    assert resolved_sections(parsed, ["fp16"])["fp16"]["enabled"] is True


@pytest.mark.parametrize(
    "config, kind, text",
    [
        ({"zero_optimization": {"stagee": 3}}, DeepSpeedConfigError, "stagee is not a key.*Did you mean"),
        ({"zero_optimization": {"stage": 7}}, AssertionError, "zero_optimization.stage = 7"),
    ],
)
def test_what_is_wrong_in_them_is_told(config, kind, text):
    refused(kind, text, resolved_sections, config, ["zero_optimization"])
    assert resolved_sections(config, ["fp16"])["fp16"]["enabled"] is False
