"""Import path of existing scripts."""

from deepspeed.engine.pipeline_engine import DualPipeVEngine, PipelineEngine  # noqa: F401
from deepspeed.pipe.failures import PipelineError  # noqa: F401
from deepspeed.utils.timer import (  # noqa: F401
    BATCH_INPUT_TIMER,
    PIPE_RECV_GRAD_TIMER,
    PIPE_RECV_INPUT_TIMER,
    PIPE_SEND_GRAD_TIMER,
    PIPE_SEND_OUTPUT_TIMER,
    TRAIN_BATCH_TIMER,
)
