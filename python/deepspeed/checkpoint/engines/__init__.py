"""Checkpoint engines: what writes and reads the files of a checkpoint. Known by name; others join by entry point."""

from deepspeed.registry import Registry

ENGINES = Registry("checkpoint engine", group="deepspeed.checkpoint_engines")
ENGINES.register("torch", "deepspeed.checkpoint.engines.torch_engine:TorchCheckpointEngine")
ENGINES.register("python", "deepspeed.checkpoint.engines.torch_engine:PythonCheckpointEngine")
ENGINES.register("fast", "deepspeed.checkpoint.engines.fast_engine:FastCheckpointEngine")
ENGINES.register("async", "deepspeed.checkpoint.engines.async_engine:AsyncCheckpointEngine")
ENGINES.register("datastates", "deepspeed.checkpoint.engines.async_engine:DataStatesCheckpointEngine")
ENGINES.register("mock", "deepspeed.checkpoint.engines.mock_engine:MockCheckpointEngine")
