"""The base classes of checkpoint engines, and the choice of one by the configuration."""

import abc
import dataclasses
import logging
import os

import torch

from deepspeed.checkpoint.engines import ENGINES
from deepspeed.checkpoint.layouts import storage
from deepspeed.checkpoint.write import verify
from deepspeed.checkpoint.write.file_writer import file_record, prepare
from deepspeed.log import logger

# ---- base ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class CheckpointCommitInfo:
    """The checkpoint that ``create`` starts and ``commit`` ends: its ``tag``, the folder ``save_dir`` above it, and
    whether ``latest`` shall name it (``save_latest``)."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(abc.ABC):
    """``config_params``: the section of the configuration that is the engine's, or None.

    A checkpoint is ``create(info)``, ``save`` of every file, ``commit(info)``. Only after ``commit`` has returned true
    are the files safe on disk; an engine that works in the background says so with ``is_decoupled``.
    """

    # The object that writes in the background (``write.background.Background``), or None: engine.step() looks at it.
    behind = None

    def __init__(self, config_params=None):
        self.config_params = config_params
        self.name = None
        self._commit_info = None

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
        self._commit_info = info

    def get_commit_info(self):
        return self._commit_info

    def wait(self):
        """Waits until what ``save`` has taken is on the disk. Raises what went wrong."""
        return None

    def cleanup(self):
        """The engine is not used any more: what is on the way to disk gets there."""
        self._commit_info = None


# ---- own -----------------------------------------------------------------------------------------------------------
# What the checkpoint engines of this library have in common.


class OwnCheckpointEngine(CheckpointEngine):
    """``config_params``: the section ``checkpoint`` of the configuration, or None for its defaults."""

    makes_files = True
    level, shown = logging.DEBUG, None  # of messages about commits, and the name in them if it is not that of the class

    def __init__(self, config_params=None):
        super().__init__(config_params)
        self.name = type(self).__name__
        self.writer = getattr(config_params, "writer", None)  # the section checkpoint.writer, or None
        self.archives = getattr(config_params, "checkpoint_serialization", True)  # files of torch.save are zip archives

    def prepare(self, name, value):
        """``value`` as the file ``name``, not yet written (``file_writer.prepare``)."""
        return prepare(name, value, self.archives)

    @abc.abstractmethod
    def write_file(self, name, value, path):
        """Writes ``value``, the file ``name`` of a checkpoint, to ``path``. Returns its record for the manifest."""

    def create(self, info):
        logger.log(self.level, f"[{self.shown or self.name}] checkpoint {getattr(info, 'tag', info)} begins")

    def save(self, state_dict, path):
        """The file is there, whole, when this returns."""
        self.write_file(path, state_dict, path)

    def load(self, path, map_location=None):
        """Tensors and plain data only, on the CPU or on the device ``map_location``; RefusedClass for anything else.

        A function or a dict as ``map_location``, as torch.load takes them, is asked where tensors of the CPU go: files
        are read to there."""
        value, device = storage.read(path), map_location
        if callable(map_location):
            found = map_location(torch.empty(0).storage(), "cpu")
            device = None if found is None else found.device
        elif isinstance(map_location, dict):
            device = map_location.get("cpu")
        return value if device is None else storage.compact(value, device)

    def commit(self, info):
        logger.log(self.level, f"[{self.shown or self.name}] checkpoint {getattr(info, 'tag', info)} is ready")
        return True


# ---- foreign -------------------------------------------------------------------------------------------------------
# Engines of others in a save of ours: ``create``, ``save``, ``load`` and ``commit``, and no more is asked of them.


class ForeignFiles:
    """Writes the files of one checkpoint through ``writer``; after ``finish`` each is at its path."""

    def __init__(self, writer, tag, save_dir, save_latest):
        self.writer = writer
        self.info = CheckpointCommitInfo(tag, save_dir, save_latest)
        self._paths = {}

    def write_file(self, name, value, path):
        if not self._paths:  # the first one
            self.writer.create(self.info)
        self.writer.save(storage.compact(value), path)  # a copy: it may still be reading when training goes on
        self._paths[name] = path

    def finish(self):
        """Returns name -> record of the files. Raises RuntimeError when the writer does not vouch for them."""
        who = f"the checkpoint engine {type(self.writer).__name__}"
        answer = self.writer.commit(self.info)
        if answer is not None and not answer:
            raise RuntimeError(f"{who} answered {answer!r} to commit({self.info.tag!r})")
        records = {}
        for name, path in self._paths.items():
            if not os.path.isfile(path):
                raise RuntimeError(f"{who} has left no file {path}: its save(state_dict, path) must write there")
            records[name] = file_record(name, os.path.getsize(path), verify.crc32_of(path))
        return records


# ---- choice --------------------------------------------------------------------------------------------------------
# Which checkpoint engine a configuration asks for.

_NEEDED = ("create", "save", "load", "commit")


def engine_name(config):
    """The name under which ``config`` (a DeepSpeedConfig) wants an engine from ``ENGINES``."""
    section, writer = config.checkpoint_config, config.checkpoint_config.writer
    kind = {"MOCK": "mock", "PYTHON": "python", "FAST": "fast"}[writer.type if writer is not None else "FAST"]
    if getattr(section, "async") or (writer is not None and writer.decoupled):
        kind = "async"
    if config.datastates_config is not None:
        kind = "datastates"
    return kind if section.engine is None else section.engine


def make_engine(config):
    """A new checkpoint engine. Its class is called with the section ``checkpoint``; one that has ``from_config`` gets
    the whole configuration. Raises UnknownNameError for a name that nobody registered, and TypeError for something else
    than an engine."""
    name = engine_name(config)
    kind = ENGINES.get(name)
    made = kind.from_config(config) if hasattr(kind, "from_config") else kind(config.checkpoint_config)
    missing = [method for method in _NEEDED if not callable(getattr(made, method, None))]
    if missing:
        raise TypeError(
            f"the checkpoint engine {name!r} ({type(made).__name__}) has no {', '.join(missing)}: see "
            "CheckpointEngine in deepspeed.runtime.checkpoint_engine for what it must have"
        )
    return made
