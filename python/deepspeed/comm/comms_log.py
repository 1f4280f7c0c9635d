"""The log of communication operations. This build records none; what asks for a record is told so."""

from deepspeed.log import logger


def _wanted(deepspeed_config):
    section = getattr(deepspeed_config, "comms_config", None) or deepspeed_config
    if isinstance(section, dict):
        section = section.get("comms_logger")
    if isinstance(section, dict):
        return bool(section.get("enabled", False))
    return bool(getattr(section, "comms_logger_enabled", getattr(section, "enabled", False)))


def configure(deepspeed_config=None, enabled=None, prof_all=None, prof_ops=None, verbose=None, debug=None):
    """Switches the log of operations; asking for it (here or with ``comms_logger.enabled``) is refused, see above."""
    if enabled or (enabled is None and _wanted(deepspeed_config)):
        raise NotImplementedError(
            "comms_logger.enabled is true, but this build does not record communication operations yet: set it to "
            "false or remove the section 'comms_logger'."
        )


def log_summary(show_straggler=False, return_dict=False):
    """Logs the recorded operations; here, that none were recorded. Returns an empty dict if ``return_dict``."""
    logger.warning("comms_logger was not enabled: there is no record of communication operations to show.")
    return {} if return_dict else None


def has_comm_data():
    """True when operations were recorded."""
    return False


def get_comm_operation_count():
    """Number of recorded operations."""
    return 0


def get_logged_comm_ops():
    """Names of the recorded operations."""
    return []


def reset_log():
    """Forgets what was recorded."""
