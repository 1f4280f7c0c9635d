"""Names in the native format: of its files, and of the tensors in them. docs/tutorials/native-checkpoints.md has both.

Needs no torch.
"""

import os
import re

FORMAT = "deepspeed-native"
VERSION = 1

MASTER = "fp32"  # kind of the fp32 weights that are trained
MODULE = "module"  # kind of what the module has besides: buffers, weights that are not trained
VALUES = "values"  # kind of tensors inside of values that are JSON otherwise
RESERVED = (MASTER, MODULE, VALUES)

_FILE = re.compile(r"checkpoint(_mp_rank_\d{2,})?\.json|rank_\d{5,}\.(json|safetensors)|frozen_[0-9a-f]+\.safetensors")


def checkpoint_json(mp_rank=0):
    """What all ranks of a model-parallel rank have in common."""
    return "checkpoint.json" if mp_rank == 0 else f"checkpoint_mp_rank_{mp_rank:02d}.json"


def rank_json(rank):
    """What one rank has alone. Every rank writes one."""
    return f"rank_{rank:05d}.json"


def rank_tensors(rank):
    return f"rank_{rank:05d}.safetensors"


def frozen_tensors(digest):
    """``digest``: hexadecimal, of names and values."""
    return f"frozen_{digest[:32]}.safetensors"


def is_native_file(name):
    return _FILE.fullmatch(name) is not None


def is_native(folder):
    """Whether ``folder`` is that of a tag in the native format."""
    return os.path.exists(os.path.join(folder, checkpoint_json()))


def mp_size(folder):
    """Model-parallel ranks that have saved the tag ``folder``."""
    count = 1
    while os.path.exists(os.path.join(folder, checkpoint_json(count))):
        count += 1
    return count


def key_of(kind, name, offset=None):
    """The name of a tensor: ``kind/name`` for a whole one, ``kind/name@offset`` for a run of its elements.

    A whole one with an @ in its name gets ``@0`` as well, so that the last @ always stands before an offset.
    """
    if kind == VALUES or (offset is None and "@" not in name):
        return f"{kind}/{name}"
    return f"{kind}/{name}@{offset or 0}"


def parsed(key):
    """Inverse of ``key_of``: ``(kind, name, offset)``, offset None for a whole tensor without an @ in its name."""
    kind, _, rest = key.partition("/")
    if kind == VALUES or "@" not in rest:
        return kind, rest, None
    name, _, offset = rest.rpartition("@")
    return kind, name, int(offset)
