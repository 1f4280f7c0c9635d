"""Import path that existing scripts use; the code is in deepspeed.config."""

from deepspeed.config.inference import (  # noqa: F401
    DeepSpeedInferenceConfig,
    DeepSpeedMoEConfig,
    DeepSpeedTPConfig,
    InferenceCheckpointConfig,
    QuantizationConfig,
)
