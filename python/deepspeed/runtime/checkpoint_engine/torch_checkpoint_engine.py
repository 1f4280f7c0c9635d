"""Import path that existing scripts use."""

from deepspeed.checkpoint.engines.built_in import TorchCheckpointEngine  # noqa: F401
