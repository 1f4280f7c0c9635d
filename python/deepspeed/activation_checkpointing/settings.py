"""The settings that ``configure`` has chosen for this process."""

import threading
from dataclasses import dataclass, field
from typing import Any, Optional

from deepspeed.activation_checkpointing.buffers import ContiguousBuffers
from deepspeed.activation_checkpointing.offload import _ActivationOffloadEngine
from deepspeed.comm.mesh_views import ask_mpu
from deepspeed.utils.timer import NoopTimer


@dataclass
class Settings:
    """Options, and what lives as long as they do."""

    configured: bool = False
    mpu: Any = None
    partition: bool = False
    contiguous: bool = False
    num_layers: Optional[int] = None
    cpu: bool = False
    synchronize: bool = False
    profile: bool = False

    offload: Optional[_ActivationOffloadEngine] = None
    buffers: Optional[ContiguousBuffers] = None
    timers: Any = field(default_factory=NoopTimer)
    inputs_compared: bool = False  # that all model-parallel ranks pass the same activations

    def parts(self):
        """Model-parallel ranks that share an activation."""
        return (ask_mpu(self.mpu, "world_size") or 1) if self.partition else 1

    def group(self):
        return ask_mpu(self.mpu, "group")


current = Settings()


def forget():
    """Back to the state before the first ``configure``."""
    current.__dict__.update(Settings().__dict__)


class _Thread(threading.local):
    """A context: while it is open, this thread computes segments again."""

    recomputing = 0

    def __enter__(self):
        self.recomputing += 1

    def __exit__(self, *error):
        self.recomputing -= 1


thread = _Thread()
