"""Timeouts: the time that ranks wait for each other."""

import contextlib
import json
import os
from datetime import timedelta

from deepspeed.constants import default_pg_timeout

_configured = None  # comm.timeout of the last configuration of this job
_given = None  # to init_distributed


def default_timeout():
    """``timedelta``: ``DS_COMM_TIMEOUT_S``, else ``comm.timeout`` of the configuration, else what init_distributed was
    given, else 30 minutes or ``DEEPSPEED_TIMEOUT``."""
    return _from_environment() or _configured or _given or default_pg_timeout


def forget():
    """The job has ended: the next one in this process has timeouts of its own."""
    global _configured, _given
    _configured = _given = None


def configure(deepspeed_config):
    """Takes ``comm.timeout`` over from a DeepSpeedConfig, a dict or a JSON file, if it is there."""
    global _configured
    if hasattr(deepspeed_config, "comm_config"):
        seconds = deepspeed_config.comm_config.timeout
    else:
        seconds = (section_of(deepspeed_config, "comm") or {}).get("timeout")
    if seconds is not None:
        _configured = timedelta(seconds=seconds)


def section_of(deepspeed_config, name):
    """The section ``name`` of a dict or a JSON file; None where it has none."""
    if isinstance(deepspeed_config, str):
        with open(deepspeed_config, encoding="utf-8") as file:
            deepspeed_config = json.load(file)
    return deepspeed_config.get(name) if isinstance(deepspeed_config, dict) else None


def chosen(timeout):
    """The timeout of torch's groups: the caller's, or ours where it is the default."""
    global _given
    if timeout is default_pg_timeout:
        return default_timeout()
    _given = timeout
    return timeout


def _from_environment():
    text, seconds = os.environ.get("DS_COMM_TIMEOUT_S"), 0.0
    if not text:
        return None
    with contextlib.suppress(ValueError):
        seconds = float(text)
    if not 0 < seconds < 1e9:
        raise ValueError(
            f"the environment variable DS_COMM_TIMEOUT_S is {text!r}; it must be a positive number of seconds, for "
            f"example DS_COMM_TIMEOUT_S=120."
        )
    return timedelta(seconds=seconds)
