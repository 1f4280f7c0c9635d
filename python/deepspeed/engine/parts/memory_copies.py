"""Snapshots of a run in the memory of its hosts, from which it goes on at any number of ranks."""

import time

import torch

from deepspeed.checkpoint.save.memory import Snapshots, host_memory
from deepspeed.checkpoint.write.ranks import Ranks
from deepspeed.comm import mesh_views
from deepspeed.engine.members import Part, engine_parts
from deepspeed.log import warning_once


@engine_parts.add("_memory_copies")
class MemoryCopies(Part):
    """A part of the engine. With ``elasticity.memory_copies`` every ``snapshot_steps``-th step ends with a snapshot of
    what ``save_checkpoint`` would write; it is copied and sent to the next host while training goes on.

    Snapshots are of the directory that ``load_checkpoint`` or ``save_checkpoint`` has named last.
    """

    _memory = _directory = snapshots = None

    def start(self):
        engine, section = self.engine, self.engine._config.elasticity_config
        if not section.memory_copies or not engine._trains:
            return
        run = engine._checkpoints.run_state()
        self._memory = host_memory(run, Ranks(run.ranks, True))
        if self._memory is None:
            warning_once(
                "elasticity.memory_copies: no agent holds memory for this job, so no snapshots are taken, and only "
                "checkpoints on disk outlive the ranks. Start it with deepspeed --elastic_training"
            )
            return
        self._every = section.snapshot_steps
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._all = mesh_views.adopted_by_all() if engine.world_size > 1 else None

    def belongs_to(self, directory):
        """The run is saved in ``directory``. Every rank calls it. Returns its ``Snapshots``, or None."""
        if self._memory is None or not directory:
            return None
        told = self._memory.ranks.gather([directory != self._directory, time.time_ns()])
        if any(other for other, _ in told):
            before = self.snapshots.leave() if self.snapshots is not None else None
            self.snapshots = Snapshots(self.engine._config, self._memory, directory, before)
            self._directory = directory
        self.snapshots.began = told[0][1]
        return self.snapshots

    def after_step(self):
        engine = self.engine
        if self._memory is None:
            return
        if engine.global_steps % self._every:
            if self.snapshots is not None:
                self.snapshots.look(self._all_of)
            return
        if self.snapshots is None:
            warning_once(
                "elasticity.memory_copies: no snapshot is taken, because neither load_checkpoint nor save_checkpoint "
                "has said yet in which directory this run is saved. Call engine.load_checkpoint(DIR) at the start"
            )
            return
        with engine._step_log.phases.inside("checkpoint"):
            self.snapshots.take(engine._checkpoints.run_state(engine._announced_end.client_state()), self._all_of)

    def _all_of(self, ok):
        if self._all is None:
            return ok
        self._flag.fill_(ok)
        self._all.run("all_reduce", output=self._flag, op="min", tag="memory_copies").wait()
        return bool(self._flag.item())

    def stop(self):
        """Waits for the snapshot that is on its way."""
        if self.snapshots is not None:
            self.snapshots.stop()
        self.snapshots = self._memory = self._all = None
