"""The functions of the stand-in device under the names that Gaudi has for them."""

import standin
import torch

import habana_frameworks.torch  # noqa: F401 (it makes the device)
from habana_frameworks.torch.hpu import random  # noqa: F401

globals().update({name: value for name, value in vars(torch.hpu).items() if not name.startswith("__")})


def memory_stats(device=None):
    """The figures of the device, and its size as ``Limit``."""
    return {**torch.hpu.memory_stats(device), "Limit": torch.hpu.mem_get_info(device)[1]}


def synchronize():
    """Waits for all devices."""
    for device in range(standin.DEVICES):
        torch.hpu.synchronize(device)
