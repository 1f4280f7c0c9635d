"""Import path that existing scripts use."""

from deepspeed.checkpoint.engines.async_engine import DataStatesCheckpointEngine  # noqa: F401
