"""Import path that existing scripts use."""

from deepspeed.checkpoint.engines.torch_engine import TorchCheckpointEngine  # noqa: F401
