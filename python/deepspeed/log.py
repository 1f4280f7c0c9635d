"""The one logger of the package, named ``DeepSpeed``, and the helpers that speak for a rank.

A line reads ``[2026-01-31 12:00:00,123] [INFO] [engine.py:42:step] [Rank 0] text``: file and line are the caller's, not
this file's. ``DS_LOG_LEVEL`` (a name such as ``info`` or a number) sets the level; without it, INFO is printed.
This file imports no torch, so that the launcher and the report can use it on a head node.
"""

import logging
import os
import sys
import threading

NAME = "DeepSpeed"
FORMAT = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

_said = set()
_said_lock = threading.Lock()


class _StdoutHandler(logging.StreamHandler):
    """Writes to whatever ``sys.stdout`` is now: test runners and notebooks replace it after we are imported."""

    def __init__(self):
        logging.Handler.__init__(self)

    @property
    def stream(self):
        return sys.stdout


def level_from_string(text):
    """The number of a level given by name (any case, ``warn`` and ``fatal`` too) or by number; ValueError otherwise."""
    name = str(text).strip().lower()
    name = {"warn": "warning", "fatal": "critical"}.get(name, name)
    if name in LEVELS:
        return LEVELS[name]
    if name.isdigit():
        return int(name)
    raise ValueError(f"{text!r} is not a log level. Use one of {', '.join(LEVELS)}, or a number.")


def create_logger(name=NAME, level=logging.INFO):
    """A logger with our format on stdout that does not pass its lines on to the root logger."""
    if not name:
        raise ValueError("create_logger needs a name: the nameless logger is the root logger of the whole program.")
    made = logging.getLogger(name)
    made.setLevel(level)
    made.propagate = False
    if not any(isinstance(handler, _StdoutHandler) for handler in made.handlers):
        handler = _StdoutHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        made.addHandler(handler)
    return made


class LoggerFactory:
    """The name under which scripts know ``create_logger``."""

    create_logger = staticmethod(create_logger)


def _create_default_logger():
    text = os.environ.get("DS_LOG_LEVEL", "")
    try:
        level = level_from_string(text) if text else logging.INFO
        problem = None
    except ValueError as error:
        level, problem = logging.INFO, str(error)
    made = create_logger(NAME, level)
    if problem:
        made.warning("The environment variable DS_LOG_LEVEL is ignored: %s", problem)
    return made


logger = _create_default_logger()


def set_log_level_from_string(log_level_str, custom_logger=None):
    """Sets the level of ``custom_logger`` (ours without one) by name; ValueError for an unknown name."""
    (custom_logger or logger).setLevel(level_from_string(log_level_str))


def print_rank():
    """This process's rank for a log line: of the process group if there is one, else ``RANK``, else 0."""
    # Looked up, not imported: whoever has a process group has imported torch.distributed already.
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else 0


def _wants(rank, ranks):
    return not ranks or rank in ranks or -1 in ranks


def log_dist(message, ranks=None, level=logging.INFO):
    """Logs ``[Rank r] message`` on the given ranks; on all of them with None, an empty list or -1 in it."""
    rank = print_rank()
    if _wants(rank, ranks):
        logger.log(level, "[Rank %d] %s", rank, message, stacklevel=2)


def _first_time(key):
    with _said_lock:
        if key in _said:
            return False
        _said.add(key)
        return True


def log_dist_once(message, ranks=None, level=logging.INFO):
    """``log_dist``, but the same text only once in this process."""
    rank = print_rank()
    if _wants(rank, ranks) and _first_time((level, str(message))):
        logger.log(level, "[Rank %d] %s", rank, message, stacklevel=2)


def warning_once(message, key=None):
    """Warns on this rank, once per process; ``key`` tells apart texts that carry changing numbers."""
    if _first_time((logging.WARNING, key if key is not None else str(message))):
        logger.warning("%s", message, stacklevel=2)


def should_log_le(max_log_level_str):
    """True when the logger prints messages of the named level: ``should_log_le("info")`` at INFO and DEBUG."""
    return logger.getEffectiveLevel() <= level_from_string(max_log_level_str)
