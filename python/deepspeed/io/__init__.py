"""Writers of files for ``torch.save``: ``torch.save(value, FastFileWriter(path, config))``."""

from deepspeed.io.base_file_writer import BaseFileWriter
from deepspeed.io.fast_file_writer import FastFileWriter, FastFileWriterConfig
from deepspeed.io.mock_file_writer import MockFileWriter
from deepspeed.io.py_file_writer import PyFileWriter

__all__ = ["BaseFileWriter", "FastFileWriter", "FastFileWriterConfig", "MockFileWriter", "PyFileWriter"]
