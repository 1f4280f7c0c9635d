"""What the device supports."""


def _is_fp16_supported():
    return True
