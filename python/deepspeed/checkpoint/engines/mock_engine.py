"""Everything of a save but the bytes, to measure everything else."""

from deepspeed.checkpoint.engines.own import OwnCheckpointEngine
from deepspeed.log import warning_once


class MockCheckpointEngine(OwnCheckpointEngine):
    """No file, no folder, and ``latest`` stays as it is."""

    makes_files = False

    def write_file(self, name, value, path):
        self.prepare(name, value)
        warning_once("checkpoint.writer.type is MOCK: save_checkpoint writes nothing. FAST writes checkpoints.")
        return None
