"""Section classes under the names that scripts import."""

import enum
import pathlib

from deepspeed.config.errors import config_error
from deepspeed.config.model import ConfigSection, section


class ZeroStageEnum(int, enum.Enum):
    """Stages of ZeRO: what is sharded over ranks. Checkpoints pickle it under the path that others know it by."""

    __module__ = "deepspeed.runtime.zero.config"

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, enum.Enum):
    """The device that offloaded tensors are moved to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """Kinds of engine state that offload_states() can move."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class DeepSpeedFP16Config(ConfigSection):
    PATH = "fp16"
    CASTS = {"loss_scale": float}

    def initial_dynamic_scale(self):
        """The loss scale that dynamic scaling starts with."""
        return 2**self.initial_scale_power

    def dynamic_loss_scale_args(self):
        """Arguments of the dynamic loss scaler."""
        return {
            "init_scale": 2**self.initial_scale_power,
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


DeepSpeedBF16Config = section("DeepSpeedBF16Config", "bf16")
DeepSpeedTorchAutocastConfig = section("DeepSpeedTorchAutocastConfig", "torch_autocast")


_OFFLOAD_CASTS = {"device": OffloadDeviceEnum, "nvme_path": pathlib.Path}
DeepSpeedZeroOffloadParamConfig = section(
    "DeepSpeedZeroOffloadParamConfig", "zero_optimization.offload_param", CASTS=_OFFLOAD_CASTS
)


class DeepSpeedZeroOffloadOptimizerConfig(ConfigSection):
    PATH = "zero_optimization.offload_optimizer"
    CASTS = _OFFLOAD_CASTS

    @property
    def pipeline(self):
        """Whether the step overlaps with reading or writing NVMe."""
        return self.pipeline_read or self.pipeline_write


ZenFlowConfig = section("ZenFlowConfig", "zero_optimization.zenflow")
DeepSpeedZeroLeafModuleConfig = section("DeepSpeedZeroLeafModuleConfig", "zero_optimization.leaf_module")


DeepSpeedZeroConfig = section(
    "DeepSpeedZeroConfig",
    "zero_optimization",
    CASTS={"stage": ZeroStageEnum},
    CHILDREN={
        "offload_param": DeepSpeedZeroOffloadParamConfig,
        "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zenflow": ZenFlowConfig,
        "leaf_module": DeepSpeedZeroLeafModuleConfig,
    },
)
DeepSpeedActivationCheckpointingConfig = section("DeepSpeedActivationCheckpointingConfig", "activation_checkpointing")
DeepSpeedFlopsProfilerConfig = section("DeepSpeedFlopsProfilerConfig", "flops_profiler")
CommsConfig = section("CommsConfig", "comms_logger")
DeepSpeedThroughputTimerConfig = section("DeepSpeedThroughputTimerConfig", "timers.throughput")
TensorBoardConfig = section("TensorBoardConfig", "tensorboard")
WandbConfig = section("WandbConfig", "wandb")
CSVConfig = section("CSVConfig", "csv_monitor")
CometConfig = section("CometConfig", "comet")
WeightQuantConfig = section("WeightQuantConfig", "weight_quantization")
HybridEngineConfig = section("HybridEngineConfig", "hybrid_engine")
CompileConfig = section("CompileConfig", "compile")
TPTrainingConfig = section("TPTrainingConfig", "tensor_parallel")
DeepSpeedNebulaConfig = section("DeepSpeedNebulaConfig", "nebula")


class DeepSpeedMonitorConfig(ConfigSection):
    """The four monitors in one object, and ``monitors``: the sections of others, as dicts. A top level of its own."""

    KINDS = {"tensorboard": TensorBoardConfig, "comet": CometConfig, "wandb": WandbConfig, "csv_monitor": CSVConfig}

    def __init__(self, strict=False, **data):
        """``data``: sections by name; other keys are an error."""
        others = data.pop("monitors", None)
        unknown = sorted(set(data) - set(self.KINDS))
        if unknown:
            text = f"{unknown[0]} is not a monitor. There are {', '.join(self.KINDS)}."
            raise config_error(text, unknown, value=data)
        made = {name: kind(strict=strict, **(data.get(name) or {})) for name, kind in self.KINDS.items()}
        self._hold(made, others or {})

    @classmethod
    def from_values(cls, values, fields):
        self = cls.__new__(cls)
        made = {name: kind.from_values(values[name], fields[name]["fields"]) for name, kind in cls.KINDS.items()}
        self._hold(made, values["monitors"])
        return self

    def _hold(self, monitors, others):
        for name, keys in others.items():
            if not isinstance(keys, dict):
                text = f"monitors.{name} has to be an object with the keys of that monitor, and is {keys!r}."
                raise config_error(text, [f"monitors.{name}"], value=others)
        vars(self).update(monitors, monitors=others)
        vars(self)["enabled"] = self.check_enabled()

    def check_enabled(self):
        """Whether any monitor is on."""
        own = any(getattr(self, name).enabled for name in self.KINDS)
        return own or any(keys.get("enabled", True) for keys in self.monitors.values())
