"""Import path of existing scripts; the code is in deepspeed.optim."""

from deepspeed.optim.lr_arguments import *  # noqa: F401,F403
from deepspeed.optim.lr_schedules import (  # noqa: F401
    WARMUP_LINEAR_RATE,
    WARMUP_LOG_RATE,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    get_torch_optimizer,
)
