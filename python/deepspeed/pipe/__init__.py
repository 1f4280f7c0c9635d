"""Pipeline parallelism: a model as a list of layers, cut into stages; schedules that are proven before they run."""

from deepspeed.registry import lazy_package

_NAMES = {
    "PipelineModule": "deepspeed.pipe.module",
    "LayerSpec": "deepspeed.pipe.layers",
    "TiedLayerSpec": "deepspeed.pipe.layers",
}

__getattr__, __dir__ = lazy_package(__name__, _NAMES)
