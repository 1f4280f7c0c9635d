"""What kinds of file a checkpoint has: the ending of the name says which, and how its value becomes a file."""

import os

from deepspeed.checkpoint.file_writer import PreparedBytes, PreparedSafetensors, PreparedTorch
from deepspeed.checkpoint.stream_file import PreparedStream

# Ending -> what makes of a file's value something with `sources` (memory, read later) and `write(path, options)`.
KINDS = {
    ".pt": PreparedTorch,
    ".safetensors": lambda value: PreparedSafetensors(*value),  # (tensors, metadata)
    ".json": PreparedBytes,
}


def prepare(name, value, archive=True):
    """``value`` as the file ``name``, not yet written. A value that is prepared already stays as it is. ``archive``:
    files of torch.save are zip archives, as ``checkpoint.checkpoint_serialization`` says, and not streams."""
    if hasattr(value, "sources") and hasattr(value, "write"):
        return value
    kind = KINDS.get(os.path.splitext(name)[1], PreparedTorch)
    return (PreparedStream if kind is PreparedTorch and not archive else kind)(value)
