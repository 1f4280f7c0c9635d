"""Import path that existing scripts use."""

from deepspeed.checkpoint.engines.built_in import AsyncCheckpointEngine as DecoupledCheckpointEngine  # noqa: F401
