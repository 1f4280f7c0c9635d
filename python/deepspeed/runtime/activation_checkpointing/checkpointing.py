"""Import path of existing scripts; the code is in deepspeed.activation_checkpointing."""

from deepspeed.activation_checkpointing import checkpointing as _checkpointing
from deepspeed.activation_checkpointing.checkpointing import *  # noqa: F403


def __getattr__(name):
    return getattr(_checkpointing, name)
