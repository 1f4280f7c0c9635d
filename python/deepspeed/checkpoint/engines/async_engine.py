"""Files copied to host memory now and written in the background."""

import os

from deepspeed.checkpoint import commit
from deepspeed.checkpoint.background import Background
from deepspeed.checkpoint.engines.fast_engine import FastCheckpointEngine
from deepspeed.checkpoint.host_cache import HostCache
from deepspeed.checkpoint.ranks_through_files import this_process
from deepspeed.checkpoint.snapshot import Snapshot
from deepspeed.checkpoint.snapshot_save import SnapshotSave
from deepspeed.log import logger

_GIB = 1 << 30


class AsyncCheckpointEngine(FastCheckpointEngine):
    """``host_cache_gib``: the bound of the memory for snapshots; None takes ``checkpoint.host_cache_size``."""

    def __init__(self, config_params=None, host_cache_gib=None):
        super().__init__(config_params)
        if host_cache_gib is None:
            host_cache_gib = getattr(config_params, "host_cache_size", None)
        self.cache = HostCache(None if host_cache_gib is None else int(host_cache_gib * _GIB))
        self.behind = Background()
        self._saves = 0
        self._expecting = False

    def is_decoupled(self):
        return True

    def expect(self, sizes, pinned=False):
        """Finds memory for files of ``sizes`` bytes, as far as the bound allows, before the first save needs it."""

        def find():
            blocks = []
            try:
                for size in sizes:
                    if self.cache.has_room(size):
                        blocks.append(self.cache.take(size, pinned))
                        blocks[-1].memory  # noqa: B018  (asked for, so that it is found)
            except RuntimeError as error:  # the save that needs it says so again
                logger.warning(f"checkpoints in the background: {error}")
            for block in blocks:
                self.cache.give_back(block)

        self._expecting = True
        self.behind.start(find)

    def _expected(self):
        if self._expecting:
            self.behind.drain()
            self._expecting = False

    def save_behind(self, saving, files, save_latest, states=None):
        """Takes a snapshot of ``files`` (``contents.files_of``) for ``saving``, which commits it when all is written.
        ``states``: ``EngineStates``, copied by the time that the engine changes them. Every rank calls it; raises on
        all ranks what any of them could not copy."""
        self._expected()
        self._saves += 1
        ranks = saving.ranks
        found = ranks.gather([*this_process(), f"{os.getpid()}-{id(self):x}-{self._saves}"])
        token = found[ranks.nodes.index(ranks.node)][2]  # the leading rank's
        saving.begin(token)
        save = SnapshotSave(self.behind, self.cache, self, saving, save_latest, states)
        try:
            error = None
            for name, value in saving.shared(files).items():
                made = value()  # some run collectives, so all are made, whatever has failed
                try:
                    if error is None:
                        save.add(name, made)
                except Exception as caught:
                    error = caught
                del made
            saving.agree(error, save.drop)
        except BaseException:
            save.drop()
            if ranks.leads:
                commit.remove_meeting(saving.place, token)
            raise
        save.end(commit.meeting_of(saving.place, token), [entry[:2] for entry in found])

    def save(self, state_dict, path):
        """Returns when ``state_dict`` may change; ``commit`` or ``wait`` say when the file is there."""
        prepared = self.prepare(path, state_dict)
        snapshot = Snapshot(self.cache)
        copies = snapshot.add(prepared.sources)
        if copies is None:
            self.write_prepared(prepared, path)
            return
        snapshot.start_late_copies()  # none, and nothing more to come
        prepared.sources = copies.sources
        self.behind.start(lambda: self._write_alone(prepared, path, copies))

    def _write_alone(self, prepared, path, copies):
        try:
            self.write_prepared(prepared, path)
        except BaseException as error:
            self.behind.fail(error, lambda steps: [steps])
        finally:
            copies.give_back()

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
