"""Import path that existing scripts use."""

from deepspeed.checkpoint.engines.base import CheckpointCommitInfo, CheckpointEngine  # noqa: F401
