"""Import path that existing scripts use."""

from deepspeed.published.compressed_backends import HcclBackend  # noqa: F401
