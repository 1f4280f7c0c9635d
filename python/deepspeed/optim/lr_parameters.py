"""Values that the parameters of learning-rate schedules may have."""

from deepspeed.log import logger

WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"
UNITS = ("steps", "samples", "tokens", "layer_tokens")  # the last one: see ``build_scheduler``


def unit_of(name, value):
    if value not in UNITS:
        raise ValueError(f"scheduler parameter {name} = {value!r} is not known: use one of {', '.join(UNITS)}.")
    return value


def number(name, value):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"scheduler parameter {name} must be a number, got {value!r} ({type(value).__name__}).")
    return float(value)


def count(name, value):
    """A whole number; 1e5, which JSON reads as a float, is one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise TypeError(f"scheduler parameter {name} must be a whole number, got {value!r} ({type(value).__name__}).")
    return int(value)


def curve(value):
    """An unknown curve is read as "log", with a warning: scripts written for DeepSpeed may name others."""
    if not isinstance(value, str):
        raise TypeError(f"scheduler parameter warmup_type must be 'log' or 'linear', got {value!r}.")
    if value not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
        logger.warning(
            "scheduler parameter warmup_type = %r is not known: use 'log' or 'linear'. The rate rises as with 'log'.",
            value,
        )
        return WARMUP_LOG_RATE
    return value
