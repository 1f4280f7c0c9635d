"""Files as ``torch.save`` writes them, one after the other."""

from deepspeed import _compat
from deepspeed.checkpoint import storage
from deepspeed.checkpoint.engines.base import CheckpointEngine
from deepspeed.log import logger


class TorchCheckpointEngine(CheckpointEngine):
    """A file is there, whole, when ``save`` returns."""

    def __init__(self, config_params=None):
        super().__init__(config_params)
        self.name = "TorchCheckpointEngine"

    def create(self, info):
        logger.info(f"[Torch] checkpoint {getattr(info, 'tag', info)} begins")

    def save(self, state_dict, path):
        """Through a temporary file beside ``path``: a crash leaves no half file under that name."""
        storage.write(state_dict, path)

    def load(self, path, map_location=None):
        return _compat.load(path, map_location=map_location)

    def commit(self, info):
        logger.info(f"[Torch] checkpoint {getattr(info, 'tag', info)} is ready")
        return True
