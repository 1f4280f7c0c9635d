"""Names and defaults that scripts import from ``deepspeed.constants``."""

import os
from datetime import timedelta

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500

CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"


def _timeout_from_environment():
    text = os.environ.get("DEEPSPEED_TIMEOUT", "30")
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if minutes <= 0:
        raise ValueError(
            f"the environment variable DEEPSPEED_TIMEOUT is {text!r}; it must be a positive number of minutes, "
            f"for example DEEPSPEED_TIMEOUT=60."
        )
    return timedelta(minutes=minutes)


# The longest time that a collective waits for the other ranks before it fails.
default_pg_timeout = _timeout_from_environment()
