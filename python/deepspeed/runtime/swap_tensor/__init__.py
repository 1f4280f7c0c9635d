"""Import path of existing scripts: the sizes from which the published swapper moves a tensor. Ours moves all sizes."""

from deepspeed.runtime.swap_tensor.utils import MIN_AIO_BYTES, MIN_SWAPPABLE_BYTES  # noqa: F401
