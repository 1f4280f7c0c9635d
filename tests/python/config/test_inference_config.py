"""The configuration of init_inference."""

import pytest
import torch

from deepspeed.config.inference import RaggedInferenceEngineConfig, merge_inference_config
from deepspeed.inference.config import DeepSpeedInferenceConfig, DeepSpeedTPConfig
from refusals import refused


def test_defaults_under_both_names():
    config = DeepSpeedInferenceConfig()
    assert config.dtype is torch.float16 and config.kernel_inject is False
    assert config.replace_with_kernel_inject is False and config.max_out_tokens == config.max_tokens == 1024
    assert config.tensor_parallel.tp_size == config.tp.tp_size == 1
    assert config.replace_method == "auto" and config.zero.stage == 0 and config.quant.weight.num_bits == 8


@pytest.mark.parametrize("dtype", ["bf16", "bfloat", "torch.bfloat16", torch.bfloat16])
def test_dtype(dtype):
    assert DeepSpeedInferenceConfig(dtype=dtype).dtype is torch.bfloat16


def test_wrong_dtype():
    refused(ValueError, "dtype", DeepSpeedInferenceConfig, dtype="fp17")
    refused(ValueError, "dtype", DeepSpeedInferenceConfig, dtype=torch.float64)
    refused(TypeError, "dtype", DeepSpeedInferenceConfig, dtype=7)


def test_old_names_forward():
    group = object()
    config = DeepSpeedInferenceConfig(mp_size=2, ep_size=4, ep_group=group, moe_type="residual", moe_experts=[8])
    assert config.tensor_parallel.tp_size == 2
    assert (config.moe.ep_size, config.moe.type, config.moe.moe_experts) == (4, "residual", [8])
    assert config.moe.ep_group is group


def test_sections_and_bare_values():
    assert isinstance(DeepSpeedInferenceConfig(tensor_parallel={"tp_size": 2}).tp, DeepSpeedTPConfig)
    assert DeepSpeedInferenceConfig(moe=False).moe.enabled is False
    policy = {torch.nn.Linear: ("a", "b")}
    assert DeepSpeedInferenceConfig(injection_policy=policy).injection_policy == policy
    assert DeepSpeedInferenceConfig(checkpoint={"type": "x"}).checkpoint == {"type": "x"}
    refused(ValueError, "tp_size", DeepSpeedInferenceConfig, tp={"tp_siz": 2})
    refused(ValueError, "max_out_tokens", DeepSpeedInferenceConfig, max_ot_tokens=2)


def test_merging():
    assert merge_inference_config({"a": 1}, {"a": 1, "b": 2}) == {"a": 1, "b": 2}
    refused(ValueError, "a = 1 in config and a = 2", merge_inference_config, {"a": 1}, {"a": 2})


def test_ragged():
    config = RaggedInferenceEngineConfig(state_manager={"max_context": 16})
    assert config.manager.max_context == config.state_manager.max_context == 16
    refused(ValueError, "greater than 0", RaggedInferenceEngineConfig, manager={"max_context": 0})
