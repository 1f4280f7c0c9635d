"""Import path of existing scripts."""

from deepspeed.engine.pipeline_engine import PipelineEngine  # noqa: F401
from deepspeed.pipe.failures import PipelineError  # noqa: F401
