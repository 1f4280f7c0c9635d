"""The op ``gds``: tensors of a GPU in files, without the host's memory. ``gds_handle()`` says why where it cannot."""

from deepspeed._native import _C

gds_handle = _C.aio.gds_handle

__all__ = ["gds_handle"]
