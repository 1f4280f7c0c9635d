"""Import path that existing scripts use; the code is in deepspeed.config."""

from deepspeed.config.sections import (  # noqa: F401
    CometConfig,
    CSVConfig,
    DeepSpeedMonitorConfig,
    TensorBoardConfig,
    WandbConfig,
)


def get_monitor_config(param_dict):
    """The monitor sections of a configuration dict."""
    names = (*DeepSpeedMonitorConfig.KINDS, "monitors")
    return DeepSpeedMonitorConfig(**{name: param_dict.get(name) for name in names})
