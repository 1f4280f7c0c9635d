"""Facts about the device."""


def _is_fp16_supported():
    return True
