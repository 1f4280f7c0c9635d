"""Checkpoint engines: what writes and reads the files of a checkpoint. Known by name; others join by entry point."""

from deepspeed.registry import Registry

ENGINES = Registry("checkpoint engine", group="deepspeed.checkpoint_engines")
ENGINES.register("torch", "deepspeed.checkpoint.engines.built_in:TorchCheckpointEngine")
ENGINES.register("python", "deepspeed.checkpoint.engines.built_in:PythonCheckpointEngine")
ENGINES.register("fast", "deepspeed.checkpoint.engines.built_in:FastCheckpointEngine")
ENGINES.register("async", "deepspeed.checkpoint.engines.built_in:AsyncCheckpointEngine")
ENGINES.register("datastates", "deepspeed.checkpoint.engines.built_in:DataStatesCheckpointEngine")
ENGINES.register("mock", "deepspeed.checkpoint.engines.built_in:MockCheckpointEngine")
