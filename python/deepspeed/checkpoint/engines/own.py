"""What the checkpoint engines of this library have in common."""

import abc

from deepspeed import _compat
from deepspeed.checkpoint import storage
from deepspeed.checkpoint.engines.base import CheckpointEngine
from deepspeed.checkpoint.kinds import prepare
from deepspeed.log import logger


class OwnCheckpointEngine(CheckpointEngine):
    """``config_params``: the section ``checkpoint`` of the configuration, or None for its defaults."""

    makes_files = True

    def __init__(self, config_params=None):
        super().__init__(config_params)
        self.name = type(self).__name__
        self.writer = getattr(config_params, "writer", None)  # the section checkpoint.writer, or None
        self.archives = getattr(config_params, "checkpoint_serialization", True)  # files of torch.save are zip archives

    @classmethod
    def from_config(cls, config):
        return cls(config.checkpoint_config)

    def prepare(self, name, value):
        """``value`` as the file ``name``, not yet written (``kinds.prepare``)."""
        return prepare(name, value, self.archives)

    @abc.abstractmethod
    def write_file(self, name, value, path):
        """Writes ``value``, the file ``name`` of a checkpoint, to ``path``. Returns its record for the manifest."""

    def create(self, info):
        logger.debug(f"[{self.name}] checkpoint {getattr(info, 'tag', info)} begins")

    def save(self, state_dict, path):
        """The file is there, whole, when this returns."""
        self.write_file(path, state_dict, path)

    def load(self, path, map_location=None):
        """Tensors and plain data only, on the CPU or on the device ``map_location``; RefusedClass for anything else.

        A function or a dict as ``map_location`` is for torch.load alone, which runs what the file asks for: only for
        files that you trust."""
        if callable(map_location) or isinstance(map_location, dict):
            return _compat.load(path, map_location=map_location)
        value = storage.read(path)
        return value if map_location is None else storage.compact(value, map_location)

    def commit(self, info):
        logger.debug(f"[{self.name}] checkpoint {getattr(info, 'tag', info)} is ready")
        return True
