"""Import path that existing scripts use."""

from deepspeed.checkpoint.engines.async_engine import AsyncCheckpointEngine as DecoupledCheckpointEngine  # noqa: F401
