"""Configurations of inference under the path that scripts import."""

from deepspeed.config.inference import RaggedInferenceEngineConfig  # noqa: F401
from deepspeed.config.inference import RaggedTPConfig as DeepSpeedTPConfig  # noqa: F401
from deepspeed.registry import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
