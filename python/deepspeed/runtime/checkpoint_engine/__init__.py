"""Import paths that existing scripts use."""

from deepspeed.checkpoint.engines.base import CheckpointCommitInfo, CheckpointEngine  # noqa: F401
from deepspeed.checkpoint.engines.torch_engine import TorchCheckpointEngine  # noqa: F401
