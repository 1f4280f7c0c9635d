"""The import path under which scripts know the logger; it lives in ``deepspeed.log``."""

from deepspeed.log import (
    LoggerFactory,
    log_dist,
    log_dist_once,
    logger,
    set_log_level_from_string,
    should_log_le,
    warning_once,
)

__all__ = [
    "LoggerFactory",
    "log_dist",
    "log_dist_once",
    "logger",
    "set_log_level_from_string",
    "should_log_le",
    "warning_once",
]
