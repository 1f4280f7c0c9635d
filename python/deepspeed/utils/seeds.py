"""Seeds of all random generators of a process."""

import random

import numpy
import torch

from deepspeed.accelerator import get_accelerator


def set_random_seed(seed):
    """Seeds Python, numpy, torch and all accelerators of this process."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    get_accelerator().manual_seed_all(seed)
