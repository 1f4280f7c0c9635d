"""The random number generators a training loop draws from."""

import random

import numpy
import torch

from deepspeed.accelerator import get_accelerator


def capture():
    """State of Python's, numpy's, torch's and the accelerator's generators, as tensors and plain values."""
    kind, keys, *rest = numpy.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(numpy.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        state["accelerator"] = accelerator.get_rng_state()
    return state


def restore(state):
    """Inverse of ``capture``."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.asarray(keys).astype(numpy.uint32), *rest))
    torch.set_rng_state(state["torch"])
    accelerator = get_accelerator()
    if "accelerator" in state and accelerator.device_name() != "cpu":
        accelerator.set_rng_state(state["accelerator"])
