"""Import path that existing scripts use."""

from deepspeed.checkpoint.engines.fast_engine import FastCheckpointEngine  # noqa: F401
