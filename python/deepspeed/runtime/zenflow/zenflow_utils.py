"""Import path that existing scripts use; the code is in deepspeed.host."""

from deepspeed.host.cores import split_cores as _split_affinity  # noqa: F401
