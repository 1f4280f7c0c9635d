"""Compression of a model as its configuration says it."""

from deepspeed.config.getters import resolved_sections

_SECTION = "compression_training"


def _nothing_wanted(deepspeed_config, call):
    # Raises for a section that switches a method on; which methods are not built is known where keys are resolved.
    section = resolved_sections(deepspeed_config, (_SECTION,))[_SECTION]
    reduction, methods = section.get("layer_reduction", {}), section.items()
    wanted = [name for name, method in methods if method.get("shared_parameters", {}).get("enabled")]
    wanted += ["layer_reduction"] * bool(reduction.get("enabled"))
    if wanted:
        raise NotImplementedError(
            f"{call}: compression by {', '.join(wanted)} is not in this build yet. Leave it out of {_SECTION}."
        )


def init_compression(model, deepspeed_config, teacher_model=None, mpu=None):
    """Returns ``model``, whose layers compress themselves while they train.

    Args:
        deepspeed_config: a dict or the path of a file with the section ``compression_training``.

    Raises:
        NotImplementedError, DeepSpeedConfigError: the section switches a method on; none is built yet.
    """
    _nothing_wanted(deepspeed_config, "init_compression")
    return model


def redundancy_clean(model, deepspeed_config, mpu=None):
    """Returns ``model`` without the parts that its compression has removed. Arguments and errors: ``init_compression``."""
    _nothing_wanted(deepspeed_config, "redundancy_clean")
    return model
