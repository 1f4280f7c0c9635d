"""Import path of existing scripts."""

from deepspeed.pipe.failures import PipelineError  # noqa: F401
from deepspeed.pipe.layers import LayerSpec, TiedLayerSpec  # noqa: F401
from deepspeed.pipe.module import DualPipeVModule, PipelineModule  # noqa: F401
