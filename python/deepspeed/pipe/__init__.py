"""Pipeline parallelism: a model as a list of layers, cut into stages; schedules that are proven before they run."""

from deepspeed.registry import lazy_package


def _other(name):
    if name in ("PipelineModule", "LayerSpec", "TiedLayerSpec"):
        raise AttributeError(f"deepspeed.pipe.{name} is not in this build yet; CHANGELOG.md says what is")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__getattr__, __dir__ = lazy_package(__name__, otherwise=_other)
