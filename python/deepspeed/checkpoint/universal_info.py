"""What a model says about its tensor-parallel slices: the ``universal_checkpoint_info`` of a checkpoint."""

import dataclasses
import re
from typing import List, Tuple, Union

from deepspeed.checkpoint import constants as keys


@dataclasses.dataclass
class SubparamShape:
    """Parameters (regular expressions in ``patterns``) that hold several sub-parameters side by side.

    ``shape`` is the whole parameter's, in which a tuple stands for sizes that lie end to end in that dimension: a fused
    query, key and value is ``((q, k, v), hidden)``. ``partition_dim``: the dimension that tensor parallelism cuts, each
    sub-parameter on its own.
    """

    __module__ = "deepspeed.checkpoint.universal_checkpoint"  # where pickles of every implementation look for it

    patterns: List[str]
    shape: Tuple[Union[Tuple[int], int]]
    partition_dim: int


_PATTERN_KEYS = (
    keys.TP_REPLICATED_PARAMETER_PATTERNS,
    keys.PARAMETER_TO_AVERAGE_PATTERNS,
    keys.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    keys.VOCABULARY_PARAMETER_PATTERNS,
    keys.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,
)


class ParallelRules:
    """How the slices of a parameter make a whole one, by its name. Patterns match at the start of a name.

    A parameter without a pattern is cut along dimension 0.
    """

    def __init__(self, info):
        self.info = info or {}
        self.sub_params = [_sub_param(entry) for entry in self.info.get(keys.PARAMETER_WITH_SUB_PARAMS, ())]
        self.used = set()

    def patterns(self):
        """Every pattern that a parameter should match."""
        found = {pattern for key in _PATTERN_KEYS for pattern in self.info.get(key, ())}
        return found | {pattern for entry in self.sub_params for pattern in entry.patterns}

    def unused(self):
        """Patterns that no name asked for so far has matched."""
        return self.patterns() - self.used

    def _find(self, patterns, name):
        for pattern in patterns:
            if re.match(pattern, name):
                self.used.add(pattern)
                return True
        return False

    def _listed(self, key, name):
        return self._find(self.info.get(key, ()), name)

    def is_replicated(self, name):
        """Every tensor-parallel rank has the same values."""
        return self._listed(keys.TP_REPLICATED_PARAMETER_PATTERNS, name)

    def is_averaged(self, name):
        """Every tensor-parallel rank has values of its own; a whole parameter is their mean."""
        return self._listed(keys.PARAMETER_TO_AVERAGE_PATTERNS, name)

    def is_row_parallel(self, name):
        """Cut along dimension 1."""
        return self._listed(keys.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS, name)

    def is_vocabulary(self, name):
        """Its rows are words, padded at the end."""
        return self._listed(keys.VOCABULARY_PARAMETER_PATTERNS, name)

    def has_two_halves(self, name):
        """Two parameters of equal size end to end along dimension 0, each cut on its own."""
        return self._listed(keys.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0, name)

    def sub_param(self, name):
        """The ``SubparamShape`` of a parameter, or None."""
        return next((entry for entry in self.sub_params if self._find(entry.patterns, name)), None)

    def is_in_every_stage(self, name):
        """Each pipeline stage has it (tied embeddings): the first one's is taken."""
        patterns = self.info.get(keys.PIPELINE_REPLICATED_PARAMETER_PATTERNS, ())
        return any(re.match(pattern, name) for pattern in patterns)

    def shard_widths(self, name):
        """For each sub-parameter the sizes of the ranks' slices of it, or None where they are equal."""
        return (self.info.get(keys.SUB_PARAM_SHARD_WIDTHS) or {}).get(name)


def _sub_param(entry):
    if isinstance(entry, SubparamShape):
        return entry
    wanted = {field.name for field in dataclasses.fields(SubparamShape)}
    if not isinstance(entry, dict) or not wanted <= set(entry):
        raise ValueError(
            f"{keys.UNIVERSAL_CHECKPOINT_INFO}.{keys.PARAMETER_WITH_SUB_PARAMS} has the entry {entry!r}; each one is a "
            f"SubparamShape or a dict with {sorted(wanted)}"
        )
    return SubparamShape(**{key: entry[key] for key in wanted})


def sub_sizes(shape, dim):
    """Sizes of the sub-parameters along ``dim`` of a ``SubparamShape.shape``, and the shape with sums in their place."""
    whole = tuple(sum(size) if isinstance(size, (tuple, list)) else int(size) for size in shape)
    sizes = shape[dim] if isinstance(shape[dim], (tuple, list)) else (shape[dim],)
    return tuple(int(size) for size in sizes), whole


def even_widths(size, parts, what):
    """``size`` cut into equal slices. Raises ValueError where that leaves a rest."""
    if size % parts:
        raise ValueError(f"{what}: {size} elements cannot be cut into {parts} equal tensor-parallel slices")
    return [size // parts] * parts
