"""One save whose files are copied now and written later."""

import os
import time

from deepspeed.checkpoint import background
from deepspeed.checkpoint.ranks_through_files import RanksThroughFiles
from deepspeed.checkpoint.snapshot import Snapshot
from deepspeed.constants import default_pg_timeout
from deepspeed.log import logger, warning_once


def timeout_s():
    """How long ranks wait for each other's writing: as long as for a collective."""
    return float(os.environ.get("DS_COMM_TIMEOUT_S") or default_pg_timeout.total_seconds())


class SnapshotSave:
    """``engine`` prepares files (``prepare``) and writes them (``write_prepared``). ``saving``: a ``Saving`` that has
    begun. ``states``: ``EngineStates``, which may be copied late."""

    def __init__(self, behind, cache, engine, saving, save_latest, states=None):
        self.behind, self.cache, self._engine = behind, cache, engine
        self.snapshot = Snapshot(cache, states)
        self.saving, self.save_latest = saving, save_latest
        self.records = {}
        self.error = None
        self.began = time.monotonic()
        background.enter(saving.place)

    # ---- in the calling thread -------------------------------------------------------------------------------------
    def add(self, name, value):
        """Takes the file ``name``: afterwards tensors in ``value`` may change, but for the engine's states. Waits while
        the cache is full; a file that is larger than all of it is written at once."""
        prepared = self._engine.prepare(name, value)
        path = os.path.join(self.saving.staging, name)
        linked = prepared.link(path) if hasattr(prepared, "link") else None
        if linked is not None:  # it is in another tag: nothing to copy
            self.records[name] = linked.to_dict()
            return
        copies = self.snapshot.add(prepared.sources)
        if copies is None:
            gib = self.snapshot.plan(prepared.sources).bytes / 2**30
            warning_once(
                f"{name} has {gib:.3f} GiB, more than all of host_cache_size: it is written at once, and training "
                f"waits. Set host_cache_size to at least {gib + 0.001:.3f} GiB"
            )
            self.records[name] = self._engine.write_prepared(prepared, path)
            return
        prepared.sources = copies.sources
        self.behind.start(lambda: self._write_one(name, prepared, path, copies))

    def drop(self):
        """What was not written yet stays so; nothing is written any more when this returns."""
        self.error = self.error or RuntimeError("given up")
        self.snapshot.drop()
        self.behind.drain()
        background.leave(self.saving.place)

    def end(self, meeting, processes):
        """All ranks have taken their snapshots: the rest happens in the background. Only now, when nothing can go wrong
        any more in the calling thread, the engine's states are held."""
        self.snapshot.start_late_copies()
        ranks = self.saving.ranks
        self.saving.ranks = RanksThroughFiles(ranks, meeting, timeout_s(), processes)
        self.behind.start(self._finish)

    # ---- in the background -----------------------------------------------------------------------------------------
    def _write_one(self, name, prepared, path, copies):
        try:
            copies.wait()
            if self.error is None:
                self.records[name] = self._engine.write_prepared(prepared, path)
        except BaseException as caught:
            self.error = caught
        finally:
            prepared.sources = ()
            copies.give_back()

    def _finish(self):
        ranks = self.saving.ranks
        try:
            self.saving.agree(self.error)
            self.saving.end(self.records, self.save_latest)
            if ranks.rank == 0:
                logger.info(
                    f"saved checkpoint {self.saving.folder} ({time.monotonic() - self.began:.1f} s after its begin)"
                )
        except BaseException as error:
            self.behind.fail(error, lambda steps: [s for s in ranks.gather(steps) if s is not None])
        finally:
            ranks.close()
            background.leave(self.saving.place)
