"""Import path of existing scripts and of pickled checkpoints; the code is in deepspeed.optim.loss_scaler."""

from deepspeed.optim.loss_scaler import (  # noqa: F401
    CONSECUTIVE_HYSTERESIS,
    DELAYED_SHIFT,
    INITIAL_LOSS_SCALE,
    MIN_LOSS_SCALE,
    SCALE_WINDOW,
    CreateLossScaler,
    DynamicLossScaler,
    LossScaleConfig,
    LossScaler,
    LossScalerBase,
    to_python_float,
)
