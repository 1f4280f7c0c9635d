"""Import path that existing scripts use; the code is in deepspeed.config."""

from deepspeed.config.sections import (  # noqa: F401
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
    ZeroStageEnum,
)
