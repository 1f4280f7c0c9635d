"""Configuration: a thin Python view of csrc/config, which holds every key, its type, default and rules."""

from deepspeed._native import DeepSpeedConfigError
from deepspeed.config.config import DeepSpeedConfig, changed_values, non_default_values
from deepspeed.config.errors import (
    DeepSpeedConfigAssertionError,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)
from deepspeed.config.model import ConfigSection, DeepSpeedConfigModel
from deepspeed.config.read import choose_config

__all__ = [
    "ConfigSection",
    "DeepSpeedConfig",
    "DeepSpeedConfigAssertionError",
    "DeepSpeedConfigError",
    "DeepSpeedConfigModel",
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "changed_values",
    "choose_config",
    "non_default_values",
]
