"""The section ``comms_logger`` under the names that scripts import."""

from deepspeed.config.sections import CommsConfig


class CommsLoggerConfig(CommsConfig):
    """``enabled``, ``prof_all``, ``prof_ops``, ``verbose``, ``debug``."""


class DeepSpeedCommsConfig:
    """The section of a whole configuration, a dict, and whether it is there."""

    def __init__(self, ds_config):
        self.comms_logger_enabled = "comms_logger" in ds_config
        if self.comms_logger_enabled:
            self.comms_logger = CommsLoggerConfig(**ds_config["comms_logger"])
