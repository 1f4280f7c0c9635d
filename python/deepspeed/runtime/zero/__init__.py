"""Import path that existing scripts use: the names of ``deepspeed.zero``."""

from deepspeed import zero


def __getattr__(name):
    return getattr(zero, name)


def __dir__():
    return dir(zero)
