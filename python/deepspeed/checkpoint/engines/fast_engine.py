"""Files written from C++: past the page cache, with checksums, synced."""

import time

from deepspeed.checkpoint.engines.own import OwnCheckpointEngine
from deepspeed.checkpoint.file_writer import WriterOptions
from deepspeed.log import logger


class FastCheckpointEngine(OwnCheckpointEngine):
    """The default. Options: the section ``checkpoint.writer``."""

    def __init__(self, config_params=None):
        super().__init__(config_params)
        writer = self.writer
        self.options = WriterOptions()
        self.times, self.shows = 1, False
        if writer is not None:
            self.options = WriterOptions(io_buffer_size=writer.io_buffer_size, double=writer.io_buffer_double)
            self.times, self.shows = writer.io_multiplier, writer.show_statistics

    def is_data_parallel_writer(self, dp_rank):
        """One of each socket or machine is known when a checkpoint is saved: here all may be."""
        return dp_rank == 0 or (self.writer is not None and self.writer.data_parallel is not None)

    def write_file(self, name, value, path):
        return self.write_prepared(self.prepare(name, value), path)

    def write_prepared(self, prepared, path):
        """Writes a file (``kinds.prepare``), so often as ``io_multiplier`` says. Returns its record as a dict."""
        began = time.perf_counter()
        for _ in range(self.times):
            record = prepared.write(path, self.options)
        if self.shows:
            seconds, bytes = time.perf_counter() - began, record.bytes * self.times
            rate = f"{bytes / 1e9:.3f} GB in {seconds:.3f} s, {bytes / seconds / 1e9:.2f} GB/s"
            logger.info(f"checkpoint.writer: {rate}, to {path}")
        return record.to_dict()
