"""Import path of existing scripts; see the package."""

MIN_AIO_BYTES = 1024**2
MIN_SWAPPABLE_BYTES = MIN_AIO_BYTES
