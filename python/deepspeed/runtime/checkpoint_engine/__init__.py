"""Import paths that existing scripts use."""

from deepspeed.checkpoint.engines.base import CheckpointCommitInfo, CheckpointEngine  # noqa: F401
from deepspeed.checkpoint.engines.built_in import AsyncCheckpointEngine as DecoupledCheckpointEngine
from deepspeed.checkpoint.engines.built_in import (
    DataStatesCheckpointEngine,  # noqa: F401
    FastCheckpointEngine,  # noqa: F401
    TorchCheckpointEngine,  # noqa: F401
)
from deepspeed.registry import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
