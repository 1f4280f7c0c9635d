"""The modules from which scripts import configuration: every such module of the published interface, and what it
holds."""

import base64
import importlib
import json

import pytest

import deepspeed
from deepspeed.config import DeepSpeedConfigError, DeepSpeedConfigModel
from refusals import refused

PATHS = {
    "deepspeed": ["DeepSpeedConfig", "DeepSpeedConfigError", "DeepSpeedInferenceConfig", "add_config_arguments",
                  "default_inference_config", "load_ds_config"],
    "deepspeed.compile.config": ["CompileConfig"],
    "deepspeed.constants": ["TORCH_DISTRIBUTED_DEFAULT_PORT"],
    "deepspeed.elasticity": ["ELASTICITY", "ENABLED", "ENABLED_DEFAULT", "elasticity_enabled",
                             "ensure_immutable_elastic_config"],
    "deepspeed.elasticity.config": ["ElasticityConfigError", "ElasticityError", "ElasticityIncompatibleWorldSize"],
    "deepspeed.inference": ["DeepSpeedTPConfig", "RaggedInferenceEngineConfig"],
    "deepspeed.inference.config": ["DeepSpeedInferenceConfig", "DeepSpeedMoEConfig", "DeepSpeedTPConfig",
                                   "InferenceCheckpointConfig", "QuantizationConfig"],
    "deepspeed.monitor.config": ["CSVConfig", "CometConfig", "DeepSpeedMonitorConfig", "TensorBoardConfig",
                                 "WandbConfig"],
    "deepspeed.runtime.config": ["ADAM_OPTIMIZER", "DeepSpeedConfig", "LAMB_OPTIMIZER", "ONEBIT_LAMB_OPTIMIZER",
                                 "get_gradient_clipping", "get_log_level"],
    "deepspeed.runtime.config_utils": ["DeepSpeedConfigModel"],
    "deepspeed.runtime.constants": ["GRADIENT_CLIPPING_DEFAULT", "LOG_LEVEL_DEFAULT"],
    "deepspeed.runtime.precision_config": ["DeepSpeedFP16Config", "get_bfloat16_config"],
    "deepspeed.runtime.tensor_parallel.config": ["TPTrainingConfig"],
    "deepspeed.runtime.zenflow.zenflow_config": ["ZenFlowConfig"],
    "deepspeed.runtime.zero.config": ["DeepSpeedZeroConfig", "DeepSpeedZeroOffloadOptimizerConfig",
                                      "DeepSpeedZeroOffloadParamConfig", "ZeroStageEnum"],
    "deepspeed.runtime.zero.leaf_module_config": ["DEFAULT_LEAF_MODULE_CLASSES", "DEFAULT_LEAF_MODULE_NAMES",
                                                  "DEFAULT_LEAF_MODULE_NAME_SUFFIXES"],
    "deepspeed.runtime.zero.offload_config": ["DeepSpeedZeroOffloadOptimizerConfig", "OffloadDeviceEnum",
                                              "OffloadStateTypeEnum"],
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_names_are_there(path):
    module = importlib.import_module(path)
    assert [name for name in PATHS[path] if not hasattr(module, name)] == []


def models():
    for path, names in PATHS.items():
        for name in names:
            found = getattr(importlib.import_module(path), name)
            if isinstance(found, type) and issubclass(found, DeepSpeedConfigModel):
                yield pytest.param(found, id=f"{path}.{name}")


@pytest.mark.parametrize("model", models())
def test_models_are_made_from_keywords(model):
    if model is DeepSpeedConfigModel:
        refused(DeepSpeedConfigError, "", model, anything=1)
        return
    made = model()
    assert model(strict=True) == made == model(**{k: v for k, v in made.model_dump().items() if k != "enabled"})
    json.dumps(made.model_dump(), default=str)
    refused(ValueError, "no_such_key", model, no_such_key=1)


def test_free_functions(tmp_path):
    given = {"train_batch_size": 8, "zero_optimization": {"reduce_bucket_size": 5e8}}
    (tmp_path / "ds.json").write_text(json.dumps(given))
    assert deepspeed.load_ds_config(given) is given and deepspeed.load_ds_config(str(tmp_path / "ds.json")) == given
    assert deepspeed.load_ds_config(base64.urlsafe_b64encode(json.dumps(given).encode()).decode()) == given
    (tmp_path / "ds.json").write_text('{"a": 1,\n"a": 2}')
    refused(ValueError, "line 1 and on line 2", deepspeed.load_ds_config, str(tmp_path / "ds.json"))
    defaults = deepspeed.default_inference_config()
    assert defaults["dtype"] == "torch.float16" and defaults["tp"]["tp_size"] == 1
    assert deepspeed.DeepSpeedInferenceConfig(**defaults).model_dump() == defaults
    assert deepspeed.inference.RaggedInferenceEngineConfig(tp={"tp_size": 2}).tensor_parallel.tp_size == 2
    assert isinstance(deepspeed.inference.RaggedInferenceEngineConfig().tp, deepspeed.inference.DeepSpeedTPConfig)
