"""Divides layers among the parts of a pipeline (``PipelineModule(partition_method=)``)."""

import re

from deepspeed.pipe.layers import class_name
from deepspeed.utils.partition import partition_balanced, partition_uniform

METHODS = "uniform, parameters, type:REGEX, profile, or a list of bounds"


def partition(layers, parts, method, measure, count):
    """Bounds: part i has the layers ``bounds[i]`` to ``bounds[i + 1] - 1``. Every part has at least one layer.

    Args:
        method: ``"uniform"`` (equal numbers of layers), ``"parameters"`` (trainable ones), ``"type:REGEX"`` (layers
            whose class name matches, in any case), ``"profile"`` (time), or the bounds.
        measure: called for ``"profile"``: the seconds of each layer.
        count: called for ``"parameters"``: the trainable elements of each layer.
    """
    if parts > len(layers):
        raise ValueError(
            f"{parts} parts of the pipeline (stages x virtual_stages) for {len(layers)} layers: each part needs a layer"
        )
    if isinstance(method, (list, tuple)):
        return _given(list(method), parts, len(layers))
    named = str(method).lower()
    if named == "uniform":
        return partition_uniform(len(layers), parts)
    if named == "parameters":
        return partition_balanced(count(), parts)
    if named.startswith("type:"):
        return partition_balanced(_matches(layers, str(method).split(":", 1)[1]), parts)
    if named == "profile":
        return partition_balanced(measure(), parts)
    raise ValueError(f"partition_method {method!r} is unknown: use {METHODS}")


def _matches(layers, pattern):
    try:
        found = [1 if re.search(pattern, class_name(layer), re.IGNORECASE) else 0 for layer in layers]
    except re.error as error:
        raise ValueError(f"partition_method 'type:{pattern}' has no regular expression: {error}") from error
    if not any(found):
        names = ", ".join(sorted({class_name(layer) for layer in layers}))
        raise ValueError(f"partition_method 'type:{pattern}' matches no layer: the classes are {names}")
    return found


def _given(bounds, parts, count):
    rising = all(isinstance(bound, int) for bound in bounds) and all(a < b for a, b in zip(bounds, bounds[1:]))
    if len(bounds) != parts + 1 or not rising or bounds[0] != 0 or bounds[-1] != count:
        raise ValueError(
            f"partition_method {bounds}: {parts} parts of {count} layers have {parts + 1} rising bounds from 0 to "
            f"{count}"
        )
    return bounds
