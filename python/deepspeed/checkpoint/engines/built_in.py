"""Files copied to host memory now and written in the background."""

import functools
import logging
import os
import secrets
import time

from deepspeed.checkpoint.engines.base import OwnCheckpointEngine
from deepspeed.checkpoint.layouts import storage
from deepspeed.checkpoint.write import commit
from deepspeed.checkpoint.write.background import Background, SnapshotSave, raise_failure
from deepspeed.checkpoint.write.file_writer import TorchSaveFile, WriterOptions, replace_file
from deepspeed.checkpoint.write.owner import Process
from deepspeed.checkpoint.write.ranks import RanksThroughFiles, take_each
from deepspeed.checkpoint.write.snapshot import HostCache, Snapshot
from deepspeed.constants import default_pg_timeout
from deepspeed.log import logger, warning_once

# ---- torch engine --------------------------------------------------------------------------------------------------
# Files as ``torch.save`` writes them, one after the other.


class TorchCheckpointEngine(OwnCheckpointEngine):
    """A file is there, whole, when ``save`` returns. Whether it outlives a power cut is for the system to say."""

    syncs, level, shown = False, logging.INFO, "Torch"

    def write_file(self, name, value, path):
        if not name.endswith(".pt"):
            return self.prepare(name, value).write(path)
        try:
            return TorchSaveFile(storage.compact(value), self.archives, self.syncs).write(path)
        except OSError as error:
            text = f"cannot write the checkpoint file {path}: {error.strerror}. Check space and permissions."
            raise OSError(error.errno, text) from error

    def save(self, state_dict, path):
        """Through a temporary file beside ``path``: a crash leaves no half file under that name."""
        replace_file(TorchSaveFile(state_dict), path)


class PythonCheckpointEngine(TorchCheckpointEngine):
    """The same, and every file of a checkpoint is on the disk before the next one (``writer.type`` PYTHON)."""

    syncs = True


# ---- fast engine ---------------------------------------------------------------------------------------------------
# Files written from C++: past the page cache, with checksums, synced.


class FastCheckpointEngine(OwnCheckpointEngine):
    """The default. Options: the section ``checkpoint.writer``."""

    def __init__(self, config_params=None):
        super().__init__(config_params)
        writer = self.writer
        self.options, self.times, self.shows = WriterOptions(), 1, False
        if writer is not None:
            self.options = WriterOptions(io_buffer_size=writer.io_buffer_size, double=writer.io_buffer_double)
            self.times, self.shows = writer.io_multiplier, writer.show_statistics

    def is_data_parallel_writer(self, dp_rank):
        """One of each socket or machine is known when a checkpoint is saved: here all may be."""
        return dp_rank == 0 or (self.writer is not None and self.writer.data_parallel is not None)

    def write_file(self, name, value, path):
        return self.write_prepared(self.prepare(name, value), path)

    def write_prepared(self, prepared, path):
        """Writes a file (``file_writer.prepare``), so often as ``io_multiplier`` says. Returns its record."""
        began = time.perf_counter()
        for _ in range(self.times):
            record = prepared.write(path, self.options)
        if self.shows:
            seconds, bytes = time.perf_counter() - began, record["bytes"] * self.times
            rate = f"{bytes / 1e9:.3f} GB in {seconds:.3f} s, {bytes / seconds / 1e9:.2f} GB/s"
            logger.info(f"checkpoint.writer: {rate}, to {path}")
        return record


# ---- mock engine ---------------------------------------------------------------------------------------------------
# Everything of a save but the bytes, to measure everything else.


class MockCheckpointEngine(OwnCheckpointEngine):
    """No file, no folder, and ``latest`` stays as it is."""

    makes_files = False

    def write_file(self, name, value, path):
        self.prepare(name, value)
        warning_once("checkpoint.writer.type is MOCK: save_checkpoint writes nothing. FAST writes checkpoints.")
        return None


# ---- async engine --------------------------------------------------------------------------------------------------

_GIB = 1 << 30


class AsyncCheckpointEngine(FastCheckpointEngine):
    """``host_cache_gib``: the bound of the memory for snapshots; None takes ``checkpoint.host_cache_size``."""

    def __init__(self, config_params=None, host_cache_gib=None):
        super().__init__(config_params)
        if host_cache_gib is None:
            host_cache_gib = getattr(config_params, "host_cache_size", None)
        self.cache = HostCache(None if host_cache_gib is None else int(host_cache_gib * _GIB))
        self.behind = Background()
        self._expecting = False

    def is_decoupled(self):
        return True

    def expect(self, sizes, pinned=False):
        """Finds memory for files of ``sizes`` bytes, as far as the bound allows, before the first save needs it."""

        def find():
            blocks = []
            try:
                for size in filter(self.cache.has_room, sizes):
                    blocks.append(self.cache.take(size, pinned))
                    blocks[-1].memory  # noqa: B018  (asked for, so that it is found)
            except RuntimeError as error:  # the save that needs it says so again
                logger.warning(f"checkpoints in the background: {error}")
            self.cache.give_back(*blocks)

        self._expecting = True
        self.behind.start(find)

    def save_behind(self, saving, files, save_latest, states=None):
        """Takes a snapshot of ``files`` (``save.save.files_of``) for ``saving``, which commits it when all is written.
        ``states``: ``HeldStates``, copied by the time that the core changes them. Every rank calls it; raises on
        all ranks what any of them could not copy."""
        if self._expecting:
            self.behind.drain()
            self._expecting = False
        ranks = saving.ranks
        found = ranks.gather([*Process.here(), secrets.token_hex(8)])
        token = found[ranks.nodes.index(ranks.node)][-1]  # the leading rank's
        meeting = commit.hidden(saving.target, f"{token}.meeting")  # one save's, where the background threads meet
        saving.begin(meeting)
        finish = functools.partial(saving.end_behind, self.behind, save_latest)
        save = SnapshotSave(self, Snapshot(self.cache, states), saving.target, saving.staging, finish)
        try:
            saving.agree(take_each(saving.shared(files), save.add), before_removal=save.drop)
        except BaseException:
            save.drop()
            if ranks.leads:
                commit.remove(meeting)
            raise
        timeout_s = float(os.environ.get("DS_COMM_TIMEOUT_S") or default_pg_timeout.total_seconds())
        saving.ranks = RanksThroughFiles(ranks, meeting, timeout_s, [Process(*entry[:-1]) for entry in found])
        save.end()

    def save(self, state_dict, path):
        """Returns when ``state_dict`` may change; ``commit`` or ``wait`` say when the file is there."""
        path = os.fspath(path)
        save = SnapshotSave(self, Snapshot(self.cache), path, "", raise_failure)
        try:
            save.add(path, state_dict)
        except BaseException:
            save.drop()
            raise
        save.end()

    def commit(self, info):
        """Waits for all files. Raises what went wrong with one of them."""
        self.behind.wait()
        return super().commit(info)

    def load(self, path, map_location=None):
        self.behind.wait()
        return super().load(os.fspath(path), map_location)

    def wait(self):
        """Waits for what is on its way to the disk. Raises what went wrong."""
        self.behind.wait()

    def cleanup(self):
        try:
            self.behind.wait()
        finally:
            self.cache.release()
            super().cleanup()


class DataStatesCheckpointEngine(AsyncCheckpointEngine):
    """The same, switched on by the section ``datastates_ckpt``, whose ``host_cache_size`` it takes."""

    @classmethod
    def from_config(cls, config):
        section = config.datastates_config
        return cls(config.checkpoint_config, section.host_cache_size if section is not None else None)
