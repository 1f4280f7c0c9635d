"""The random number generators a training loop draws from."""

import random

import numpy
import torch

from deepspeed.accelerator import get_accelerator


def capture():
    """State of Python's, numpy's, torch's and the accelerator's generators of this process."""
    state = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        state["accelerator"] = accelerator.get_rng_state()
    return state


def restore(state):
    """Inverse of ``capture``."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    accelerator = get_accelerator()
    if "accelerator" in state and accelerator.device_name() != "cpu":
        accelerator.set_rng_state(state["accelerator"])
