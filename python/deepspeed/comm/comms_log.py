"""The log of communication operations of this process: switching it on, asking it, and what it listens to.

It records what goes through ``deepspeed.comm``, through ``torch.distributed`` (not with ``DS_COMMS_LOGGER_RAW=0``) and
through the native engine. While it records, every operation waits for its end, so that its time is its own; nothing
overlaps.
"""

import json
import os

from deepspeed import _native
from deepspeed.comm import timed
from deepspeed.comm.comms_logger import CommsLogger
from deepspeed.comm.timeouts import section_of
from deepspeed.config.sections import CommsConfig
from deepspeed.log import logger, print_rank

comms_logger = CommsLogger()


def _switch(on):
    if on:
        comms_logger.recorder = _native._C.CallRecorder(waits=True, caller=timed.caller_name)
        torch_calls = os.environ.get("DS_COMMS_LOGGER_RAW", "1") != "0"
        timed.listen(comms_logger.recorder, torch_calls, comms_logger)
    else:
        timed.stop_listening(comms_logger.recorder, comms_logger)
        comms_logger.recorder = None


comms_logger.on_switch = _switch
collect = comms_logger.collect


def _section(deepspeed_config):
    """The section ``comms_logger`` of a DeepSpeedConfig, a dict or a JSON file; None where it has none."""
    if hasattr(deepspeed_config, "comms_config"):
        return deepspeed_config.comms_config if deepspeed_config.comms_logger_enabled else None
    section = section_of(deepspeed_config, "comms_logger")
    return None if section is None else CommsConfig(**section)


def configure(deepspeed_config=None, enabled=None, prof_all=None, prof_ops=None, verbose=None, debug=None):
    """Switches the log of operations on or off and says what it records.

    deepspeed_config: a DeepSpeedConfig, a dict or the path of a JSON file, whose section ``comms_logger`` is applied
    if there is one. The others go before it: enabled: record; prof_all: all operations; prof_ops: list of names
    ("all_reduce", ...) to record when not all are; verbose: a line for each operation; debug: names of callers, too.
    """
    section = _section(deepspeed_config) if deepspeed_config is not None else None
    if section is not None:
        comms_logger.configure(section)
    given = {"prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug, "enabled": enabled}
    for name, value in given.items():
        if value is not None:
            setattr(comms_logger, name, list(value) if name == "prof_ops" else bool(value))


# ---- asking ---------------------------------------------------------------------------------------------------------
def log_summary(show_straggler=False, return_dict=False):
    """Logs a table of the recorded operations on rank 0; returns it as a dict on every rank with ``return_dict``.

    ``show_straggler``: with the time this rank has waited for others; then every rank calls it. The dict:
    ``{"summary": {operation: {bytes: figures}}, "metadata": ..., "straggler_analysis": ...}``, {} without a record.
    """
    collect()
    if not comms_logger.enabled and not comms_logger.has_data():
        logger.warning("comms_logger was not enabled: there is no record of communication operations to show.")
        return {} if return_dict else None
    with timed.suppress_logging():
        return comms_logger.log_all(print_rank() == 0, show_straggler, return_dict)


def write_summary(path, show_straggler=False):
    """Writes what ``log_summary(return_dict=True)`` returns to a JSON file, on rank 0. Returns the dict.

    ``show_straggler``: every rank calls it.
    """
    collect()
    with timed.suppress_logging():
        found = comms_logger.log_all(False, show_straggler, True)
    if print_rank() == 0:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
    return found


def has_comm_data():
    """True when operations were recorded."""
    collect()
    return comms_logger.has_data()


def get_comm_operation_count():
    """Number of recorded operations."""
    collect()
    return comms_logger.get_total_operations()


def get_logged_comm_ops():
    """Names of the recorded operations."""
    collect()
    return comms_logger.get_operation_names()


def reset_log():
    """Forgets what was recorded."""
    collect()
    comms_logger.reset_data()
