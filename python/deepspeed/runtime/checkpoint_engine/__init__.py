"""Import paths that existing scripts use."""

from deepspeed.checkpoint.engines.async_engine import (  # noqa: F401
    AsyncCheckpointEngine as DecoupledCheckpointEngine,
)
from deepspeed.checkpoint.engines.async_engine import DataStatesCheckpointEngine  # noqa: F401
from deepspeed.checkpoint.engines.base import CheckpointCommitInfo, CheckpointEngine  # noqa: F401
from deepspeed.checkpoint.engines.fast_engine import FastCheckpointEngine  # noqa: F401
from deepspeed.checkpoint.engines.torch_engine import TorchCheckpointEngine  # noqa: F401
from deepspeed.registry import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
