"""DeepSpeedConfig: input forms, attributes, section objects, world size."""

import base64
import copy
import json
import pathlib
import pickle
import re
from types import SimpleNamespace

import pytest
import torch

from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError, choose_config, non_default_values
from deepspeed.config.read import read
from deepspeed.config.sections import (
    DeepSpeedFP16Config,
    DeepSpeedMonitorConfig,
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
    ZeroStageEnum,
)
from deepspeed.config.world import MeshShape
from deepspeed.monitor.config import TensorBoardConfig
from deepspeed.runtime.config import ADAM_OPTIMIZER, get_gradient_clipping, get_log_level
from deepspeed.runtime.config import DeepSpeedConfig as same
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT, LOG_LEVEL_DEFAULT
from deepspeed.runtime.precision_config import get_bfloat16_config
from deepspeed.runtime.zero.leaf_module_config import DEFAULT_LEAF_MODULE_CLASSES
from refusals import refused


def write(folder, text):
    path = folder / "ds.json"
    path.write_text(text)
    return str(path)


def test_the_three_forms_are_equal(tmp_path):
    config = {"train_batch_size": 8, "gradient_clipping": 0.5, "zero_optimization": {"reduce_bucket_size": 5e8}}
    text = json.dumps(config)
    forms = [config, write(tmp_path, text), tmp_path / "ds.json", base64.urlsafe_b64encode(text.encode()).decode()]
    made = [DeepSpeedConfig(form) for form in forms]
    for one in made:
        assert one._values == made[0]._values and one._param_dict == config
        bucket = one.zero_config.reduce_bucket_size
        assert bucket == 500_000_000 and isinstance(bucket, int)
    assert made[0]._param_dict is config


@pytest.mark.parametrize(
    "given, sizes",
    [
        ((32, 4, None), (32, 4, 4)), ((32, None, None), (32, 16, 1)), ((None, 4, 3), (24, 4, 3)),
        ((32, 16, 1), (32, 16, 1)), ((32, 4, 3), None), ((None, None, 2), None), ((3, None, None), None),
    ],
)  # fmt: skip
def test_batch_sizes_that_are_set_afterwards(given, sizes):
    config = DeepSpeedConfig({"train_batch_size": 2}, world_size=2)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name, value in zip(names, given):
        setattr(config, name, value)
    if sizes is None:
        refused(AssertionError, "", config._configure_train_batch_size)
    else:
        config._configure_train_batch_size()
        assert tuple(getattr(config, name) for name in names) == sizes
        for one in (config, pickle.loads(pickle.dumps(config))):
            read_by_core = one.native.values()
            assert tuple(read_by_core[name] for name in names) == sizes


def test_files_as_people_write_them(tmp_path):
    path = write(
        tmp_path,
        """{ // the batch
  "train_batch_size": 8,   # per step
  /* learning
     rate */
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3,},},
  steps_per_print: Infinity
  "gradient_clipping": 1
}
""",
    )
    config = DeepSpeedConfig(path)
    assert config.optimizer_params == {"lr": 1e-3} and config.steps_per_print == float("inf")
    assert config.gradient_clipping == 1.0


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "empty"),
        ("[1]", "one object"),
        ('{"a": 1', "'}' is missing"),
        ('{"a" 1}', "expected ':'"),
        ('{"a": [1, 2}', "expected ',' or ']'"),
        ('{"a": "x}', "no closing quote"),
        ('{"a": 1} x', "after the end"),
        ('{"a": yes}', 'text without quotes "yes}"'),
        ('{"a": 1.2.3}', 'text without quotes "1.2.3}"'),
        ("{/* }", "no */"),
        ('{"a": "\\q"}', "escape"),
        ('{"a": ' * 65 + "1" + "}" * 65, "nested deeper"),
    ],
)
def test_texts_that_are_no_configuration(tmp_path, text, words):
    where = r"(?s)ds\.json:\d+:\d+: .*"
    refused(DeepSpeedConfigError, where + re.escape(words), DeepSpeedConfig, write(tmp_path, text))


def test_bytes_that_are_not_utf8(tmp_path):
    (tmp_path / "ds.json").write_bytes(b'{"a":\n "\xff"}')
    refused(DeepSpeedConfigError, r":2:3: .*UTF-8", DeepSpeedConfig, str(tmp_path / "ds.json"))


def test_duplicate_keys_name_both_lines(tmp_path):
    text = '{"train_batch_size": 8,\n "fp16": {"enabled": false,\n\n "enabled": true}}'
    words = '"fp16.enabled" is given twice, on line 2 and on line 4'
    refused(DeepSpeedConfigError, words, DeepSpeedConfig, write(tmp_path, text))


def test_dotted_private_keys_are_no_duplicates():
    config = DeepSpeedConfig({"train_batch_size": 8, "zero_optimization": {"stage": 0}, "zero_optimization.stage": 3})
    assert config.zero_optimization_stage == 0 and "zero_optimization.stage" in config.warnings[0]


def test_blanks_around_keys_are_stripped_with_a_warning(tmp_path):
    for form in ({"train_batch_size ": 8}, write(tmp_path, '{" train_batch_size": 8}')):
        config = DeepSpeedConfig(form)
        assert config.train_batch_size == 8 and "blanks" in config.warnings[0]


def test_values_of_the_program_come_back():
    group, function = object(), lambda: 1
    tensor_parallel = {"tp": {"tp_group": group}, "dtype": torch.bfloat16}
    made = DeepSpeedConfig({"train_batch_size": 8, "private": function, "tensor_parallel": tensor_parallel})
    assert made.tensor_parallel_config.tp.tp_group is group
    assert made.tensor_parallel_config.dtype is torch.bfloat16 and made._param_dict["private"] is function
    wrong = {"train_batch_size": 8, "gradient_clipping": group}
    refused(DeepSpeedConfigError, "gradient_clipping = <object", DeepSpeedConfig, wrong)


def test_a_dict_that_contains_itself_is_refused():
    config = {"train_batch_size": 8}
    config["fp16"] = config
    refused(DeepSpeedConfigError, "contains itself", DeepSpeedConfig, config)


def test_auto_stands_for_the_default_in_validated_sections_and_is_reported():
    given = {"train_batch_size": 8, "zero_optimization": {"reduce_bucket_size": "auto", "overlap_comm": "auto"}}
    assert DeepSpeedConfig(given).zero_config.reduce_bucket_size == 500_000_000
    noted = [issue["paths"][0] for issue in read(given).issues() if issue["severity"] == "note"]
    assert noted == ["zero_optimization.reduce_bucket_size", "zero_optimization.overlap_comm"]
    assert given["zero_optimization"]["reduce_bucket_size"] == "auto"


def test_unknown_top_level_keys(monkeypatch):
    config = {"train_batch_size": 8, "msamp": {"enabled": True}, "my_own_key": 1}
    made = DeepSpeedConfig(config)
    assert len(made.warnings) == 1 and "my_own_key" in made.warnings[0]
    monkeypatch.setenv("DS_STRICT_CONFIG", "1")
    refused(DeepSpeedConfigError, "my_own_key", DeepSpeedConfig, config)


def test_deprecated_names_warn_once_and_forward():
    config = DeepSpeedZeroConfig(cpu_offload_param=True)
    assert isinstance(config.offload_param, DeepSpeedZeroOffloadParamConfig) and config.offload_param.device == "cpu"
    config = DeepSpeedZeroConfig(stage3_gather_fp16_weights_on_model_save=True)
    assert config.gather_16bit_weights_on_model_save is True
    made = DeepSpeedConfig({"train_batch_size": 8, "allgather_size": 7, "zero_optimization": False})
    assert made.zero_config.allgather_bucket_size == 7
    assert sum("allgather_size" in text for text in made.warnings) == 1


def test_both_names_of_a_deprecated_key_are_an_assertion_error():
    error = refused(
        AssertionError, "both are given", DeepSpeedZeroConfig, cpu_offload=True, offload_optimizer={"device": "cpu"}
    )
    assert isinstance(error, DeepSpeedConfigError)
    refused(
        AssertionError,
        "both are given",
        DeepSpeedConfig,
        {"train_batch_size": 8, "zero_optimization": {"cpu_offload_param": True, "offload_param": {}}},
    )


@pytest.mark.parametrize(
    "text",
    ["5", " 5\n", "5.0", "-0", "+5", "1_000", "1__0", "5.5", "5e2", "1e-2", "", "x", "0x10", "five", "5,0"],
)
def test_numbers_in_quotes_are_taken_where_pydantic_takes_them(text):
    pydantic = pytest.importorskip("pydantic", minversion="2")

    def taken(make):
        try:
            return make()
        except ValueError:
            return None

    class Theirs(pydantic.BaseModel):
        whole: int = 0
        real: float = 0.0

    class Mine(DeepSpeedConfigModel):
        whole: int = 0
        real: float = 0.0

    whole, real = taken(lambda: Theirs(whole=text).whole), taken(lambda: Theirs(real=text).real)
    assert taken(lambda: Mine(whole=text).whole) == whole and taken(lambda: Mine(real=text).real) == real
    assert taken(lambda: DeepSpeedZeroConfig(reduce_bucket_size=text).reduce_bucket_size) == whole
    assert taken(lambda: DeepSpeedFP16Config(loss_scale=text).loss_scale) == real


def test_numbers_in_quotes_are_read_with_a_warning():
    config = DeepSpeedConfig(
        {"train_batch_size": 8, "zero_optimization": {"stage": "2"}, "fp16": {"loss_scale": "1.5e2"}}
    )
    assert config.zero_optimization_stage == 2 and config.float16_config.loss_scale == 150.0
    assert sum("is a text and is read as" in text for text in config.warnings) == 2
    refused(DeepSpeedConfigError, "without quotes", DeepSpeedConfig, {"train_batch_size": "8"})


def test_files_may_be_hjson(tmp_path):
    path = tmp_path / "ds.hjson"
    path.write_text(
        "# every liberty of HJSON\n"
        "train_batch_size: 8\n"
        "optimizer: {\n  type: AdamW  \n  params: { lr: 3e-4, betas: [0.9, 0.95] }\n}\n"
        "tensorboard: {\n  job_name: my job, number 1\n  output_path: '''\n    a/b\n    '''\n}\n"
        "/* braces around\n the whole are optional */\n"
    )
    config = DeepSpeedConfig(str(path))
    assert config.optimizer_name == "adamw" and config.optimizer_params == {"lr": 3e-4, "betas": [0.9, 0.95]}
    assert config.monitor_config.tensorboard.job_name == "my job, number 1"
    assert config.monitor_config.tensorboard.output_path == "a/b"
    path.write_text("{\n  train_batch_size: 8\n  optimizer: { type: AdamW }\n}\n")
    refused(DeepSpeedConfigError, "ds.hjson:5:1.*On line 3 the text without quotes", DeepSpeedConfig, str(path))


def test_zero_as_a_bare_boolean():
    assert DeepSpeedConfig({"train_batch_size": 8, "zero_optimization": False}).zero_optimization_stage == 0
    words, wrong = "must be true or false or a section", {"train_batch_size": 8, "zero_optimization": "true"}
    refused(DeepSpeedConfigError, words, DeepSpeedConfig, wrong)


def test_sections_made_by_themselves():
    assert DeepSpeedZeroConfig().overlap_comm is False and DeepSpeedZeroConfig(stage=3).overlap_comm is True
    assert DeepSpeedZeroConfig(stage=3, overlap_comm=False).overlap_comm is False
    config = DeepSpeedZeroConfig(stage=2, stage3_prefetch_bucket_size=12345, offload_param={}, offload_optimizer=None)
    assert config.prefetch_bucket_size == config.stage3_prefetch_bucket_size == 12345
    assert config.stage is ZeroStageEnum.gradients and config.stage == 2
    assert config.offload_param.device is OffloadDeviceEnum.none and config.offload_optimizer is None
    assert DeepSpeedZeroConfig(prefetch_bucket_size=7).stage3_prefetch_bucket_size == 7
    assert DeepSpeedZeroOffloadOptimizerConfig(pipeline_read=True).pipeline is True
    assert DeepSpeedZeroOffloadOptimizerConfig().pipeline is False
    assert DeepSpeedZeroOffloadParamConfig(nvme_path="/x").nvme_path == pathlib.Path("/x")
    refused(ValueError, "ratio", DeepSpeedZeroConfig, stage=2, offload_optimizer={"ratio": 0.5})
    refused(ValueError, "stage", DeepSpeedZeroConfig, stag=2)
    refused(ValueError, "auto", DeepSpeedFP16Config, strict=True, loss_scale="auto")
    monitor = DeepSpeedMonitorConfig(csv_monitor={"enabled": True})
    assert monitor.enabled and monitor.csv_monitor.job_name == "DeepSpeedJobName"


def test_section_objects_behave():
    config = DeepSpeedZeroConfig(stage=1, offload_optimizer={"device": "cpu"})
    dumped = config.model_dump()
    assert dumped == config.dict() and dumped["offload_optimizer"]["device"] == "cpu"
    assert DeepSpeedZeroConfig(**{key: value for key, value in dumped.items() if value is not None}) == config
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other == config and other.prefetch_bucket_size == config.prefetch_bucket_size
    other.prefetch_bucket_size = 3
    assert other != config and other.stage3_prefetch_bucket_size == 3
    with pytest.raises(AttributeError, match="no_such_key"):
        config.no_such_key  # noqa: B018
    fp16 = DeepSpeedFP16Config(initial_scale_power=8, hysteresis=3)
    assert fp16.initial_dynamic_scale() == 256 and fp16.dynamic_loss_scale_args()["delayed_shift"] == 3


def test_attributes_and_pickling():
    config = DeepSpeedConfig(
        {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "adamw", "params": {"lr": 0.1}},
            "scheduler": {"type": "StepLR", "params": {"step_size": 3}},
            "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1e2},
            "communication_data_type": "FP32",
            "data_types": {"grad_accum_dtype": "fp32"},
            "checkpoint": {"tag_validation": "fail"},
            "flops_profiler": {},
        },
        world_size=3,
    )
    assert (config.train_batch_size, config.gradient_accumulation_steps, config.world_size) == (6, 1, 3)
    assert (config.optimizer_name, config.optimizer_params) == ("adamw", {"lr": 0.1})
    assert config.optimizer_legacy_fusion is False
    assert (config.scheduler_name, config.scheduler_params) == ("StepLR", {"step_size": 3})
    assert config.fp16_enabled and not config.bfloat16_enabled and config.float16_config.loss_scale_window == 100
    assert config.communication_data_type == "fp32" and config.grad_accum_dtype == "fp32"
    assert config.checkpoint_tag_validation_enabled and config.checkpoint_tag_validation_fail
    assert config.gradient_clipping == 1.0 and config.steps_per_print is None
    assert config.zero_enabled is False and config.zero_force_ds_cpu_optimizer is True
    assert config.monitor_config.enabled is False and config.flops_profiler_config.enabled is False
    again = pickle.loads(pickle.dumps(config))
    assert again.zero_config == config.zero_config and again._param_dict == config._param_dict
    for other in (again, copy.deepcopy(config)):  # what the core reads comes from the same keys
        assert other.native.values()["zero_optimization"] == config.native.values()["zero_optimization"]
    config.print("test")
    lines = non_default_values(config).splitlines()
    assert 'optimizer.type = "AdamW" (given)' in lines
    assert not any(line.startswith("fp16.loss_scale =") for line in lines)
    assert any(line.startswith("train_batch_size = 6 (derived") for line in lines)


def test_names_of_torch_optimizers_are_exact():
    assert DeepSpeedConfig({"train_batch_size": 8, "optimizer": {"type": "SGD"}}).optimizer_name == "SGD"
    assert DeepSpeedConfig({"train_batch_size": 8, "optimizer": {"type": "ADAM"}}).optimizer_name == "adam"


MPU = SimpleNamespace(get_data_parallel_world_size=lambda: 4)
SEQUENCE_MPU = SimpleNamespace(get_data_parallel_world_size=lambda: 4, get_sequence_parallel_world_size=lambda: 2)
MESH = SimpleNamespace(mesh_dim_names=("sequence_parallel", "data_parallel"), size=(2, 5).__getitem__)


def test_where_the_world_size_comes_from(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = {"train_micro_batch_size_per_gpu": 1}
    assert DeepSpeedConfig(config).train_batch_size == 2
    assert DeepSpeedConfig(config, world_size=3).train_batch_size == 3
    assert DeepSpeedConfig(config, mpu=MPU).train_batch_size == 4
    assert DeepSpeedConfig(config, mesh_device=MESH).train_batch_size == 5
    monkeypatch.delenv("WORLD_SIZE")
    assert DeepSpeedConfig(config).train_batch_size == 1
    monkeypatch.setenv("WORLD_SIZE", "two")
    refused(DeepSpeedConfigError, "WORLD_SIZE", DeepSpeedConfig, config)


def test_features_that_are_not_built_are_refused_when_switched_on_only():
    off = {"hybrid_engine": {"enabled": False, "pin_parameters": True}, "amp": {"enabled": False, "opt_level": "O1"}}
    DeepSpeedConfig({"train_batch_size": 8, **off})
    for on in (
        {"hybrid_engine": {"enabled": True}},
        {"amp": {"enabled": True}},
        {"optimizer": {"type": "MuSGD"}},
    ):
        config = {"train_batch_size": 8, **on}
        refused(DeepSpeedConfigError, "not supported yet", DeepSpeedConfig, config, world_size=2)


def test_ranks_that_share_sequences():
    config = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2}
    assert DeepSpeedConfig(config, world_size=6).train_batch_size == 3
    assert DeepSpeedConfig({**config, "data_parallel_size": 3}, world_size=6).train_batch_size == 3
    bare = {"train_micro_batch_size_per_gpu": 1}
    for told in ({"mpu": SEQUENCE_MPU}, {"mesh_device": MeshShape((4, 2))}):
        found = DeepSpeedConfig(bare, world_size=8, **told)
        assert (found.train_batch_size, found.sequence_parallel_size) == (4, 2)
    wrong = [
        ({"sequence_parallel_size": 4}, {"world_size": 6}, "does not divide the 6 ranks"),
        (
            {"sequence_parallel_size": 2, "data_parallel_size": 2},
            {"world_size": 6},
            "data_parallel_size is 2, but .* 3",
        ),
        ({"sequence_parallel_size": 4}, {"mpu": SEQUENCE_MPU}, "is 4, but mpu.get_sequence_.* says 2"),
        ({"sequence_parallel_size": 4}, {"mpu": MPU}, "no get_sequence_parallel_world_size"),
        ({}, {"mesh_device": MeshShape((3, 2)), "world_size": 4}, r"\(3, 2\) makes 6 ranks, but there are 4"),
    ]
    for keys, told, words in wrong:
        refused(DeepSpeedConfigError, words, DeepSpeedConfig, {**bare, **keys}, **told)
    for shape in (2, (2,), (2, 0), ("a", 2)):
        refused(DeepSpeedConfigError, "mesh_param is", MeshShape, shape)


def test_choose_config(capsys):
    args = SimpleNamespace(deepspeed_config="x.json")
    assert choose_config(args, None, None) == "x.json" and choose_config(None, {"a": 1}) == {"a": 1}
    assert choose_config(None, None, {"b": 1}) == {"b": 1}
    refused(AssertionError, "args.deepspeed_config", choose_config, args, {"a": 1})
    refused(AssertionError, "no DeepSpeed configuration", choose_config)
    assert choose_config(SimpleNamespace(deepscale_config="y.json")) == "y.json"
    assert "deepscale_config is deprecated" in "".join(capsys.readouterr())


def test_import_paths_of_scripts():
    assert same is DeepSpeedConfig and ADAM_OPTIMIZER == "adam"
    assert (GRADIENT_CLIPPING_DEFAULT, LOG_LEVEL_DEFAULT) == (1.0, None)
    assert get_gradient_clipping({}) == 1.0 and get_gradient_clipping({"gradient_clipping": 0}) == 0.0
    assert get_log_level({"log_level": "info"}) == "INFO" and get_log_level({}) is None
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled is True
    assert isinstance(TensorBoardConfig(), DeepSpeedConfigModel)
    assert len(DEFAULT_LEAF_MODULE_CLASSES) == 3
