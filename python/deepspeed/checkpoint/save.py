"""Writes a checkpoint of an engine."""

import os
import time

import torch

from deepspeed.checkpoint import commit, file_writer, names
from deepspeed.checkpoint.contents import files_of
from deepspeed.checkpoint.export import save_16bit_model
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.standalone import write_script
from deepspeed.log import log_dist, logger
from deepspeed.version import __version__

__all__ = ["save_16bit_model", "save_checkpoint"]


def _agreed_tag(engine, ranks, tag):
    """The tag of rank 0. Whether another one elsewhere is an error is for ``checkpoint.tag_validation`` to say."""
    tags = ranks.gather(tag)
    others = [(rank, other) for rank, other in enumerate(tags) if other != tags[0]]
    if not others or not engine._config.checkpoint_tag_validation_enabled:
        return tags[0]
    text = (
        f"rank 0 saves under tag {tags[0]!r}, "
        + ", ".join(f"rank {rank} under {other!r}" for rank, other in others)
        + "; pass the same tag on every rank"
    )
    if engine._config.checkpoint_tag_validation_fail:
        raise ValueError(text)
    logger.warning(f"{text}. All save under {tags[0]!r}.")
    return tags[0]


def _without_own_keys(engine, client_state):
    """``client_state`` without what load_checkpoint handed back of the engine's own: passed on to the next save, those
    old values would replace the current ones."""
    loaded = engine.loaded_engine_state
    return {key: value for key, value in client_state.items() if not (key in loaded and loaded[key] is value)}


def save_checkpoint(engine, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False):
    """Every rank calls it. The checkpoint appears under its name when it is complete and on the disk; until then, and
    if anything fails, the one before it is what ``latest`` names. Source: see ``checkpoint.commit``.

    Raises ValueError without ``save_dir``, KeyError when ``client_state`` uses a reserved key, OSError on all ranks
    when a rank cannot write: it names the rank and the file. Returns True.
    """
    if not save_dir:
        raise ValueError(f"save_checkpoint needs a directory, got save_dir={save_dir!r}")
    client_state = _without_own_keys(engine, client_state or {})
    if names.RESERVED_KEY in client_state:
        raise KeyError(f"client_state may not use the key {names.RESERVED_KEY!r}: it is the engine's own; rename yours")
    ranks = Ranks(engine, engine._config.use_node_local_storage)
    tag = _agreed_tag(engine, ranks, str(tag if tag is not None else f"global_step{engine.global_steps}"))
    saving = Saving(engine, ranks, os.fspath(save_dir), tag)
    saving.begin()
    records = saving.write(files_of(engine, client_state, exclude_frozen_parameters))
    saving.end(records, save_latest)
    log_dist(f"saved checkpoint {saving.folder}", ranks=[0])
    return True


class Saving:
    """One checkpoint on its way to the disk."""

    def __init__(self, engine, ranks, save_dir, tag):
        self.engine, self.ranks = engine, ranks
        self.save_dir, self.tag = save_dir, tag
        self.folder = os.path.join(save_dir, tag)
        self.failed = f"the checkpoint {self.folder} is not saved, the one before it is unharmed"

    def _together(self, function):
        """Runs ``function`` on the leading ranks; every rank learns of a failure, and the hidden folder goes."""
        error = None
        if self.ranks.leads:
            try:
                function()
            except Exception as caught:
                error = caught
        self._agree(error)

    def _agree(self, error):
        try:
            self.ranks.agree(error, self.failed)
        except Exception:
            if self.ranks.leads:
                commit.abandon(self.folder)
            self.ranks.gather(None)  # nobody goes on while files are still being removed
            raise

    def begin(self):
        self._together(lambda: commit.begin(self.folder))

    def write(self, files):
        """Writes the files of this rank. Returns name -> record, as the manifest holds it."""
        staging, records, error = commit.staging_of(self.folder), {}, None
        for name, value in files.items():
            made = value()  # some run collectives, so all are made, whatever has failed
            try:
                if error is None:
                    path = os.path.join(staging, name)
                    records[name] = file_writer.write_torch(made, path, self._options()).to_dict()
            except Exception as caught:
                error = caught
            del made
        self._agree(error)
        return records

    def _options(self):
        return file_writer.WriterOptions()

    def end(self, records, save_latest):
        """All have written: the checkpoint takes its place."""
        together = {}
        for part in self.ranks.beside(self.ranks.gather(records)):
            together.update(part)
        self._together(lambda: self._commit(together, save_latest))

    def _commit(self, records, save_latest):
        commit.finish(self.folder, self._facts(), records)
        if self.engine.zero_optimization_stage() > 0:
            write_script(self.save_dir)
        if save_latest:
            commit.replace_text(os.path.join(self.save_dir, names.LATEST), self.tag)
        keep_last = self.engine._config.checkpoint_config.keep_last
        if keep_last is not None:
            commit.retire(self.save_dir, keep_last, self.tag)

    def _facts(self):
        engine = self.engine
        return {
            "tag": self.tag,
            "saved_at": time.time(),
            "ds_version": __version__,
            "torch": str(torch.__version__),
            "world_size": engine.world_size,
            "dp_world_size": engine.dp_world_size,
            "mp_world_size": engine.mp_world_size,
            "zero_stage": engine.zero_optimization_stage(),
            "global_steps": engine.global_steps,
        }
