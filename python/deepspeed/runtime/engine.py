"""Import path that existing scripts use."""

from deepspeed import comm as dist  # noqa: F401  (tests of clients replace functions of both by this path)
from deepspeed.engine.engine import (  # noqa: F401
    DeepSpeedEngine,
    DeepSpeedOptimizerCallable,
    DeepSpeedSchedulerCallable,
)
from deepspeed.engine.parts.checkpoints import parallel_metadata as _checkpoint_parallel_metadata  # noqa: F401
from deepspeed.engine.parts.training_data import ROUTE_EVAL, ROUTE_PREDICT, ROUTE_TRAIN  # noqa: F401
from deepspeed.utils import groups  # noqa: F401
