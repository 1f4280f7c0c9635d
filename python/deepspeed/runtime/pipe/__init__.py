"""Import path that existing scripts use. Its names and files are imported when they are first used."""

from deepspeed.registry import lazy_package

_NAMES = {
    "ProcessTopology": "deepspeed.pipe.topology",
    "PipelineModule": "deepspeed.pipe.module",
    "LayerSpec": "deepspeed.pipe.layers",
    "TiedLayerSpec": "deepspeed.pipe.layers",
}

__getattr__, __dir__ = lazy_package(__name__, _NAMES)
