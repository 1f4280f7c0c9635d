"""Import path of existing scripts."""

from deepspeed.data.random_ltd import RandomLTDScheduler  # noqa: F401
