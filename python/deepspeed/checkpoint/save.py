"""Writes a checkpoint of an engine."""

import os
import time

import torch

from deepspeed.checkpoint import background, commit, names, native_contents, tags
from deepspeed.checkpoint.contents import common_names, files_of
from deepspeed.checkpoint.engine_states import EngineStates
from deepspeed.checkpoint.engines.foreign import ForeignFiles
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.sharing import make_sharing
from deepspeed.checkpoint.standalone import write_script
from deepspeed.log import log_dist, logger, warning_once
from deepspeed.version import __version__


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
        raise AssertionError(text)  # the type that scripts catch
    logger.warning(f"{text}. All save under {tags[0]!r}.")
    return tags[0]


def _agreed_place(ranks, save_dir, tag):
    """The folder that the tag is. Where it is none for a rank, whose disk may be another, all raise."""
    error = found = None
    try:
        found = tags.folder_of(save_dir, tag)
    except (ValueError, OSError) as caught:
        error = caught
    try:
        ranks.agree(error, "nothing is saved")
    except Exception:
        if error is not None:
            raise error from None
        raise
    return found


def _without_own_keys(engine, client_state):
    """``client_state`` without what load_checkpoint handed back of the engine's own: passed on to the next save, those
    old values would replace the current ones."""
    loaded = engine.loaded_engine_state
    return {key: value for key, value in client_state.items() if not (key in loaded and loaded[key] is value)}


def save_checkpoint(engine, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False):
    """Every rank calls it. The checkpoint appears under its name when it is complete and on the disk; until then, and
    if anything fails, the one before it is what ``latest`` names. Source: see ``checkpoint.commit``. Who writes it is
    ``engine.checkpoint_engine``; one that writes in the background has a copy of everything when this returns.

    ``save_dir`` and the tag may be symbolic links to folders: those are saved into. A tag may be a path of plain names.

    Raises ValueError without ``save_dir``, or for a tag that is no name of a folder in it; AssertionError when ranks
    must agree on the tag and do not, KeyError when ``client_state`` uses a reserved key, OSError on all ranks when a
    rank cannot write: it names the rank and the file. Returns True.
    """
    if not save_dir:
        raise ValueError(f"save_checkpoint needs a directory, got save_dir={save_dir!r}")
    client_state = _without_own_keys(engine, client_state or {})
    if names.RESERVED_KEY in client_state:
        raise KeyError(f"client_state may not use the key {names.RESERVED_KEY!r}: it is the engine's own; rename yours")
    writer = engine.checkpoint_engine
    behind = getattr(writer, "behind", None)
    ranks = Ranks(engine, engine._config.use_node_local_storage)
    if behind is not None:
        behind.tell_together(ranks)
    tag = _agreed_tag(engine, ranks, str(tag if tag is not None else f"global_step{engine.global_steps}"))
    tags.check_tag(tag, os.fspath(save_dir))
    sharing = make_sharing(engine, ranks) if hasattr(writer, "write_prepared") else None
    files = files_of(engine, client_state, exclude_frozen_parameters, sharing is not None and sharing.writes)
    place = _agreed_place(ranks, os.fspath(save_dir), tag)
    saving = Saving(engine, ranks, os.fspath(save_dir), tag, place, sharing)
    background.wait_for(saving.place)
    if not getattr(writer, "makes_files", True):
        saving.write(files, writer)
        log_dist(f"no checkpoint {saving.folder}: {writer.name} writes nothing", ranks=[0])
    elif behind is not None and not _on_disks_of_nodes(ranks):
        writer.save_behind(saving, files, save_latest, EngineStates(engine))
        log_dist(f"checkpoint {saving.folder} is copied and being written", ranks=[0])
    else:
        if not hasattr(writer, "write_file"):
            writer = ForeignFiles(writer, tag, saving.save_dir, save_latest)
        saving.begin()
        saving.end(saving.write(saving.shared(files), writer), save_latest)
        log_dist(f"saved checkpoint {saving.folder}", ranks=[0])
    return True


def _on_disks_of_nodes(ranks):
    if len(set(ranks.nodes)) == 1:
        return False
    warning_once(
        "checkpoint.use_node_local_storage: the ranks of several nodes have no common folder in which their background "
        "threads could agree, so checkpoints are written at once, and training waits. Save into a directory that all "
        "nodes see, with use_node_local_storage false, to write in the background"
    )
    return True


class Saving:
    """One checkpoint on its way to the disk. It keeps nothing of the engine: training may go on meanwhile."""

    def __init__(self, engine, ranks, save_dir, tag, place, sharing=None):
        self.ranks, self.sharing = ranks, sharing
        self._common = common_names(engine)
        self.save_dir, self.tag = save_dir, tag
        self.folder = os.path.join(save_dir, tag)
        self.place = place  # that folder, whatever links lead to it
        self.staging = None  # where this rank's files are written, after ``begin``
        self.failed = f"the checkpoint {self.folder} is not saved, the one before it is unharmed"
        self._facts = _facts(engine, tag)
        self._with_script = engine._stage_policy.saved.optimizer_by_rank and not native_contents.is_wanted(engine)
        self._keep_last = engine._config.checkpoint_config.keep_last
        self._in_place = engine._config.checkpoint_config.write_in_place

    def _together(self, function):
        """Runs ``function`` on the leading ranks; every rank learns of a failure, and the hidden folder goes. Returns
        what it has returned on the leading rank of this rank's node."""
        error = found = None
        if self.ranks.leads:
            try:
                found = function()
            except Exception as caught:
                error = caught
        told = self.agree(error, value=found)
        return told[self.ranks.nodes.index(self.ranks.node)]

    def agree(self, error, before_removal=None, value=None):
        """Raises on all ranks when one has an ``error``; the hidden folder goes, after ``before_removal()`` on all.
        Returns the ``value`` of every rank."""
        try:
            return self.ranks.agree(error, self.failed, value)
        except Exception:
            if before_removal is not None:
                before_removal()
                self.ranks.gather(None)
            if self.ranks.leads and self.staging is not None:
                commit.abandon(self.place, self.staging)
            self.ranks.gather(None)  # nobody goes on while files are still being removed
            raise

    def begin(self, token=None):
        """Makes the hidden folder, and with a ``token`` the one in which the ranks meet in the background."""

        def make():
            self.staging = commit.begin(self.place, self._in_place)
            if token is not None and self.ranks.size > 1:
                commit.make_meeting(self.place, token)
            return self.staging

        self.staging = self._together(make)
        if self.staging == self.place:
            lost = "it was written in place, so what was there is gone"
            self.failed = f"the checkpoint {self.folder} is not saved; {lost}"

    def shared(self, files):
        """``files``, with those of which all data-parallel ranks have the same cut into parts. Every rank calls it,
        after ``begin``. A file system without hidden folders has no files with several writers: one rank writes them
        there."""
        if self.sharing is None:
            return files
        if self.staging == self.place:
            leads, self.sharing = self.sharing.leads or not self.sharing.writes, None
            return {name: value for name, value in files.items() if leads or name not in self._common}
        return self.sharing.cut(files, self._common, lambda error, value: self.agree(error, value=value))

    def write(self, files, writer):
        """Writes the files of this rank through ``writer.write_file``. Returns name -> record for the manifest."""
        staging, records, error = self.staging or "", {}, None  # no folder for an engine that writes nothing
        for name, value in files.items():
            made = value()  # some run collectives, so all are made, whatever has failed
            try:
                if error is None:
                    records[name] = writer.write_file(name, made, os.path.join(staging, name))
            except Exception as caught:
                error = caught
            del made
        if error is None and hasattr(writer, "finish"):
            try:
                records = writer.finish()
            except Exception as caught:
                error = caught
        self.agree(error)
        return records

    def end(self, records, save_latest):
        """All have written: the checkpoint takes its place."""
        everyones, together = self.ranks.gather(records), {}
        if self.sharing is not None:
            error = None
            try:
                records = self.sharing.complete(everyones, self.staging)
            except Exception as caught:
                error = caught
            everyones = self.agree(error, value=records)
        for part in self.ranks.beside(everyones):
            together.update(part)
        self._together(lambda: self._commit(together, save_latest))

    def _commit(self, records, save_latest):
        commit.finish(self.place, self.staging, self._facts, records)
        if self._with_script:
            write_script(self.save_dir)
        if save_latest:
            commit.replace_text(os.path.join(self.save_dir, names.LATEST), self.tag)
        if self._keep_last is not None:
            commit.retire(self.save_dir, self._keep_last, self.tag)


def _facts(engine, tag):
    return {
        "tag": tag,
        "saved_at": time.time(),
        "ds_version": __version__,
        "torch": str(torch.__version__),
        "world_size": engine.world_size,
        "dp_world_size": engine.dp_world_size,
        "mp_world_size": engine.mp_world_size,
        "zero_stage": engine.zero_optimization_stage(),
        "global_steps": engine.global_steps,
    }
