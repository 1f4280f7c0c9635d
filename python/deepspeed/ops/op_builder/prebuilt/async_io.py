"""The op ``async_io``: tensors in files, beside the computation."""

from deepspeed._native import _C

aio_handle = _C.aio.aio_handle
aio_read = _C.aio.aio_read
aio_write = _C.aio.aio_write
deepspeed_memcpy = _C.aio.deepspeed_memcpy

__all__ = ["aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"]
