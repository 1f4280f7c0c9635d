"""Import path that existing scripts use."""

from deepspeed.checkpoint.engines.built_in import FastCheckpointEngine  # noqa: F401
