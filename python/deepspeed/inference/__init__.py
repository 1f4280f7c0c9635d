"""Configurations of inference under the path that scripts import."""

from deepspeed.config.inference import RaggedInferenceEngineConfig  # noqa: F401
from deepspeed.config.inference import RaggedTPConfig as DeepSpeedTPConfig  # noqa: F401
