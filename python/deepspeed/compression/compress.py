"""Compression of a model as its configuration says it."""

from deepspeed.config.getters import resolved_sections

_SECTION = "compression_training"


def _refuse_methods(deepspeed_config):
    # The configuration refuses each method that a section switches on, because none is built yet.
    resolved_sections(deepspeed_config, (_SECTION,))


def init_compression(model, deepspeed_config, teacher_model=None, mpu=None):
    """Returns ``model``, whose layers compress themselves while they train.

    Args:
        deepspeed_config: a dict or the path of a file with the section ``compression_training``.

    Raises:
        DeepSpeedConfigError: the section switches a method on; none is built yet.
    """
    _refuse_methods(deepspeed_config)
    return model


def redundancy_clean(model, deepspeed_config, mpu=None):
    """Returns ``model`` without the parts that its compression has removed. Arguments and errors: ``init_compression``."""
    _refuse_methods(deepspeed_config)
    return model
