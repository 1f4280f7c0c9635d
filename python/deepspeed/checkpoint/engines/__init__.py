"""Checkpoint engines: what writes and reads the files of a checkpoint. Known by name; others join by entry point."""

from deepspeed.registry import Registry

ENGINES = Registry("checkpoint engine", group="deepspeed.checkpoint_engines")
ENGINES.register("torch", "deepspeed.checkpoint.engines.torch_engine:TorchCheckpointEngine")
