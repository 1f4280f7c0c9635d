"""What every checkpoint engine can do."""

import abc
import os


class CheckpointCommitInfo:
    """The checkpoint that ``create`` starts and ``commit`` ends: its ``tag``, the folder ``save_dir`` above it, and
    whether ``latest`` shall name it (``save_latest``)."""

    def __init__(self, tag, save_dir, save_latest):
        self.tag = tag
        self.save_dir = save_dir
        self.save_latest = save_latest


class CheckpointEngine(abc.ABC):
    """``config_params``: the section of the configuration that is the engine's, or None.

    A checkpoint is ``create(info)``, ``save`` of every file, ``commit(info)``. Only after ``commit`` has returned true
    are the files safe on disk; an engine that works in the background says so with ``is_decoupled``.
    """

    def __init__(self, config_params=None):
        self.config_params = config_params
        self.name = None

    @abc.abstractmethod
    def create(self, info):
        """A checkpoint begins. ``info``: a ``CheckpointCommitInfo``, or its tag alone."""

    @abc.abstractmethod
    def save(self, state_dict, path):
        """Writes one file, or takes a copy to write it later."""

    @abc.abstractmethod
    def load(self, path, map_location=None):
        """The content of one file."""

    @abc.abstractmethod
    def commit(self, info):
        """All files of the checkpoint are safe on disk when this returns true. Raises what went wrong in writing."""

    def makedirs(self, path, exist_ok=False):
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank):
        """Whether this data-parallel rank writes the files of which every one has the same."""
        return dp_rank == 0

    def is_decoupled(self):
        """Whether ``save`` returns before the file is written."""
        return False

    def set_commit_info(self, info):
        """Tells a decoupled engine what it will commit."""

    def get_commit_info(self):
        return None

    def cleanup(self):
        """The engine is not used any more: what is on the way to disk gets there."""
