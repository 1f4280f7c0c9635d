"""Import path that existing scripts use; the code is in deepspeed.config."""

from deepspeed.config.getters import get_bfloat16_config, get_float16_config  # noqa: F401
from deepspeed.config.sections import (  # noqa: F401
    DeepSpeedBF16Config,
    DeepSpeedFP16Config,
    DeepSpeedTorchAutocastConfig,
)
