"""The parallel degrees that a model file notes."""

from deepspeed.checkpoint.constants import CHECKPOINT_PP_DEGREE, CHECKPOINT_TP_DEGREE

_PIPELINE = ("get_pipeline_model_parallel_world_size", "get_pipe_parallel_world_size")
_TENSOR = (
    "get_tensor_model_parallel_world_size",
    "get_slice_parallel_world_size",
    "get_model_parallel_world_size",
)


def parallel_metadata(mpu):
    """``{pp_degree, tp_degree}`` of an ``mpu``, under whichever names it has them; 1 each without."""
    return {CHECKPOINT_PP_DEGREE: _ask(mpu, _PIPELINE), CHECKPOINT_TP_DEGREE: _ask(mpu, _TENSOR)}


def _ask(mpu, methods):
    for name in methods:
        method = getattr(mpu, name, None)
        if method is not None:
            return method()
    return 1
