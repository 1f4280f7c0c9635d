"""Writes a checkpoint of a run (``RunState``)."""

import os
import time
from collections.abc import Mapping

import torch

from deepspeed._native import _C
from deepspeed.checkpoint.convert.export import write_script
from deepspeed.checkpoint.engines.base import ForeignFiles
from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.read.weights import run_states
from deepspeed.checkpoint.save import contents, native
from deepspeed.checkpoint.save.contents import HeldStates, counters_of
from deepspeed.checkpoint.write import background, commit, owner
from deepspeed.checkpoint.write.by_rank import PartsByRank
from deepspeed.checkpoint.write.file_writer import Cuts, PreparedTorch, SharedTorch, complete
from deepspeed.checkpoint.write.pointer import replace_text
from deepspeed.checkpoint.write.ranks import Ranks, failure_of, raise_together, take_each
from deepspeed.comm.agreement import attempt
from deepspeed.host.cpu import socket_of_process
from deepspeed.host.launcher_messages import tell_launcher
from deepspeed.log import log_dist, logger, warning_once
from deepspeed.version import __version__
from deepspeed.zero.parameters.sharded_parameter import is_sharded

# ---- contents ------------------------------------------------------------------------------------------------------
# The files that this rank writes, and the value of each.


def files_of(run, client_state, exclude_frozen_parameters=False, with_common=False):
    """dict: name of a file below the tag's folder -> function that gives its value, for the files of this rank.
    ``with_common``: also the model file where rank 0 of the data-parallel group has the same.

    Every rank calls all of them in this order: some run collectives. Tensors of the values may be views of what is
    trained: write them, or copy them, before the next step. A ``TensorOfPieces`` may stand for a tensor.
    """
    if native.is_wanted(run):
        return native.files_of(run, client_state, exclude_frozen_parameters)
    saved = run.policy.saved
    dp_rank, mp_rank = run.ranks.dp_rank, run.ranks.mp_rank
    parts, found = PartsByRank(run, exclude_frozen_parameters), {}
    if saved.model_by_rank or dp_rank == 0 or with_common:
        kind = names.SHARDED_MODEL_STATES if saved.model_by_rank else names.MODEL_STATES
        name = kind(dp_rank=dp_rank, mp_rank=mp_rank)
        # Now, and not when the file is written: errors of a client scheduler come before any folder is made.
        schedule = run.scheduler.state_dict() if hasattr(run.scheduler, "state_dict") else None
        found[name] = lambda: _model_states(run, client_state, exclude_frozen_parameters, parts, schedule)
    if saved.optimizer_by_rank and run.states is not None:
        name = names.OPTIM_STATES(
            dp_rank=dp_rank, mp_rank=mp_rank, prefix="bf16_" if run.config.bfloat16_enabled else ""
        )
        found[name] = lambda: {
            "optimizer_state_dict": run.optimizer_state(),
            "ds_config": run.ds_config,
            "ds_version": __version__,
            **run.optimizer_facts,
        }
    found[names.RUN_STATES(rank=run.ranks.rank)] = lambda: run_states(run)
    return {**found, **parts.files}


def expected_bytes(run):
    """An estimate of the bytes of tensors in each larger file of this rank, rather too many than too few."""
    saved, tensors = run.policy.saved, [*(param for _, param in run.weights.unique()), *run.weights.buffers.values()]
    leads = run.ranks.dp_rank == 0
    module = sum(t.numel() * t.element_size() for t in tensors) if leads and not saved.model_by_rank else 0
    states = run.states.expected_bytes() if run.states is not None and (leads or saved.optimizer_by_rank) else 0
    files = [states, module] if saved.optimizer_by_rank else [module + states]
    return [size + size // 50 + (1 << 20) for size in files if size > 0]


def _model_states(run, client_state, exclude_frozen_parameters, parts, schedule):
    described, saved = parts.described, run.policy.saved
    frozen = saved.frozen_listed and not exclude_frozen_parameters
    whole = not saved.optimizer_by_rank and not (described and described["table"])
    module = run.module_state(exclude_frozen_parameters=exclude_frozen_parameters)
    params = run.weights.params.items() if saved.model_by_rank else ()
    cut = {name for name, param in params if name in module and is_sharded(param)}
    module.update({name: torch.empty(0, dtype=module[name].dtype) for name in cut})
    state = {
        "module": parts.module_of(module),
        "buffer_names": parts.buffers,
        "optimizer": run.optimizer_state() if run.optimizer_state is not None and whole else None,
        "param_shapes": contents.param_shapes(run) if saved.optimizer_by_rank else None,
        "frozen_param_shapes": contents.frozen_shapes(run) if frozen else None,
        "shared_params": run.weights.tied() if saved.optimizer_by_rank else None,
        "frozen_param_fragments": contents.frozen_fragments(run) if frozen else None,
        "lr_scheduler": schedule,
        **counters_of(run),
        "ds_config": run.ds_config,
        "ds_version": __version__,
        **({names.PARAMS_BY_RANK: described} if described else {}),
    }
    return {**state, **client_state}


# ---- sharing -------------------------------------------------------------------------------------------------------
# Ranks share the writing of the file that is equal on all data-parallel ranks (``writer.data_parallel``).


def make_sharing(run, ranks):
    """A ``Sharing`` for one save, or None where nothing is to be shared. Every rank calls it."""
    mode = getattr(run.config.checkpoint_config.writer, "data_parallel", None)
    if mode is None or run.policy.saved.model_by_rank or native.is_wanted(run):
        return None
    local = int(os.environ.get("LOCAL_RANK", 0))
    own = [_C.host_id(), socket_of_process(local), run.ranks.mp_rank, run.ranks.dp_rank]
    return Sharing(mode.upper(), ranks.gather(own), ranks)


class Sharing:
    """``facts``: [host, socket, model-parallel rank, data-parallel rank] of every rank.

    REPLICA: every data-parallel rank writes; SOCKET: one of each socket of each host; MACHINE: one of each host. With a
    disk for every node (``ranks.nodes``) those on the node of the first.
    """

    def __init__(self, mode, facts, ranks):
        self.ranks, mp_rank = ranks, facts[ranks.rank][2]
        members = sorted((fact[3], rank) for rank, fact in enumerate(facts) if fact[2] == mp_rank)
        first = {}  # replica, socket or host -> its first rank
        for dp_rank, rank in members:
            if ranks.nodes[rank] == ranks.nodes[members[0][1]]:
                host, socket_number = facts[rank][:2]
                first.setdefault({"REPLICA": dp_rank, "SOCKET": (host, socket_number), "MACHINE": host}[mode], rank)
        self.writers = list(first.values())  # ranks that share this rank's files, the one that leads first
        self.writes = ranks.rank in self.writers and len(self.writers) > 1
        self.leads = self.writes and self.writers[0] == ranks.rank
        self.name = names.MODEL_STATES(mp_rank=mp_rank)
        self._led = None  # (PreparedTorch, Cuts) of the file, where this rank completes it

    def cut(self, files, agree):
        """``files`` as ``files_of`` gives them, with the part of this rank instead of the model file. Every rank calls
        it; ``agree(error, value=)`` gives the values of all, or raises on all."""
        made, error = attempt(lambda: PreparedTorch(files[self.name]()) if self.writes else None)
        told = agree(error, value=[len(made.native.texts), made.native.entries()] if made is not None else None)
        if made is not None:
            texts, entries = told[self.writers[0]]
            own = [list(entry) for entry in made.native.entries()[texts:-2]]
            if own == [list(entry) for entry in entries[texts:-2]]:
                cuts = Cuts(entries, texts, len(self.writers))
                part = SharedTorch(made, cuts, self.writers.index(self.ranks.rank))
                files = {**files, self.name: lambda: part}
                self._led = (made, cuts) if self.leads else None
            else:
                error = RuntimeError(
                    f"{self.name} has other tensors here than on rank {self.writers[0]}: ranks can share its writing "
                    "only when all have the same; set checkpoint.writer.data_parallel to null, or give all the same "
                    "client_state"
                )
        agree(error)
        return files

    def complete(self, records, folder):
        """Ends the file if this rank leads. ``records``: of every rank, name -> record. Returns this rank's own, in
        which the file is a whole one or is not there."""
        own = dict(records[self.ranks.rank])
        if self.writes:
            del own[self.name]
        if self._led is not None:
            parts = [records[rank][self.name]["part"] for rank in self.writers]
            own[self.name] = complete(os.path.join(folder, self.name), *self._led, parts)
        return own


# ---- save ----------------------------------------------------------------------------------------------------------


def _agreed_tag(run, ranks, tag, error):
    """The tag of rank 0. Whether another one elsewhere is an error is for ``checkpoint.tag_validation`` to say. All
    raise where any rank has an ``error``, which that rank raises itself."""
    names = ranks.agree(error, "nothing is saved", tag, own=True)
    others = [(rank, other) for rank, other in enumerate(names) if other != names[0]]
    if others and run.config.checkpoint_tag_validation_enabled:
        under = ", ".join(f"rank {rank} under {other!r}" for rank, other in others)
        text = f"rank 0 saves under tag {names[0]!r}, {under}; pass the same tag on every rank"
        if run.config.checkpoint_tag_validation_fail:
            raise AssertionError(text)  # the type that scripts catch
        logger.warning(f"{text}. All save under {names[0]!r}.")
    return names[0]


def _agreed_folder(ranks, save_dir, tag, error):
    """The folder that the tag is. Where it is none for a rank, whose disk may be another, all raise, as they do where a
    rank could not collect its files (``error``)."""
    found, no_folder = attempt(lambda: names.folder_of(save_dir, tag), (ValueError, OSError))
    failures = ranks.gather(failure_of(ranks.rank, error or no_folder))
    if error is not None and None not in failures:  # all know already: of one rank, or of all together
        raise error
    if error is None and no_folder is not None:
        raise no_folder
    raise_together(failures, "nothing is saved", error)
    return found


def checked_client_state(run):
    """The client's state without the values of the run itself that load_checkpoint gave to the client: passed on to the
    next save, also as copies, those old values would replace the current ones. TypeError for no dict, KeyError for
    another value under a key of the engine."""
    given, loaded = run.client_state, run.loaded_values
    if not isinstance(given, Mapping):
        raise TypeError(
            f"client_state is a dict of what load_checkpoint is to return, and this is {type(given).__name__}"
        )
    taken = {*names.ENGINE_KEYS, *names.OWN_KEYS, *loaded}
    current = {**vars(run.counters), **vars(run.ranks), "ds_config": run.ds_config}
    for key, value in given.items():
        if key not in taken or (key in loaded and loaded[key] is value):
            continue
        if key in loaded:
            if _plain_text(loaded[key]) != _plain_text(value):
                warning_once(
                    f"save_checkpoint: client_state has {key!r}, which load_checkpoint returned, with another value. "
                    "The key is the engine's own, so its current value is saved. Leave it out, or rename yours",
                    key=f"client_state {key}",
                )
        elif key not in current or _plain_text(current[key]) != _plain_text(value):
            raise KeyError(
                f"client_state may not use the key {key!r}: it is the engine's own, and load_checkpoint would take "
                "your value for the engine's. Rename yours"
            )
    return {key: value for key, value in given.items() if key not in taken}


def _plain_text(value):
    """Equal for a value and for its copies, those by way of JSON included."""
    if isinstance(value, Mapping):
        return {str(key): _plain_text(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_text(one) for one in value]
    return value if isinstance(value, (bool, int, float, type(None))) else str(value)


def save_checkpoint(run, save_dir, tag=None, save_latest=True, exclude_frozen_parameters=False):
    """``run``: a ``RunState``, whose ``writer`` writes the files; one that writes in the background has a copy of
    everything when this returns. Every rank calls it. The checkpoint appears under its name when it is complete and on
    the disk; until then, and if anything fails, the one before it is what ``latest`` names. See ``write/commit.py``.

    ``save_dir`` and the tag may be symbolic links to folders: those are saved into. A tag may be a path of plain names.

    Raises ValueError without ``save_dir``, or for a tag that is no name of a folder in it; AssertionError when ranks
    must agree on the tag and do not, KeyError when ``client_state`` uses a reserved key, OSError on all ranks when a
    rank cannot write: it names the rank and the file; RuntimeError on all ranks when a function that gives a value to
    be saved raises on one (``lr_scheduler.state_dict()``): it names the rank and the error. Returns True.
    """
    if not save_dir:
        raise ValueError(f"save_checkpoint needs a directory, got save_dir={save_dir!r}")
    client_state, error = attempt(lambda: checked_client_state(run))
    writer = run.writer
    behind = getattr(writer, "behind", None)
    ranks = Ranks(run.ranks, run.config.use_node_local_storage)
    if behind is not None:
        behind.tell_together(ranks)
    tag = _agreed_tag(run, ranks, str(tag if tag is not None else f"global_step{run.counters.global_steps}"), error)
    names.check_tag(tag, os.fspath(save_dir))
    sharing = make_sharing(run, ranks) if hasattr(writer, "write_prepared") else None
    with_common = sharing is not None and sharing.writes

    def collect():
        files = files_of(run, client_state, exclude_frozen_parameters, with_common)
        return files, HeldStates(run) if behind is not None else None

    made, error = attempt(collect)
    files, states = made or (None, None)
    target = _agreed_folder(ranks, os.fspath(save_dir), tag, error)
    saving = Saving(run, ranks, os.fspath(save_dir), tag, target, sharing)
    background.wait_for(saving.target)
    if not getattr(writer, "makes_files", True):
        saving.write(files, writer)
        log_dist(f"no checkpoint {saving.folder}: {writer.name} writes nothing", ranks=[0])
    elif behind is not None and len(set(ranks.nodes)) == 1:
        writer.save_behind(saving, files, save_latest, states)
        log_dist(f"checkpoint {saving.folder} is copied and being written", ranks=[0])
    else:
        if behind is not None:
            warning_once(
                "checkpoint.use_node_local_storage: the ranks of several nodes have no common folder in which their "
                "background threads could agree, so checkpoints are written at once, and training waits. Save into a "
                "directory that all nodes see, with use_node_local_storage false, to write in the background"
            )
        if not hasattr(writer, "write_file"):
            writer = ForeignFiles(writer, tag, saving.save_dir, save_latest)
        saving.begin()
        saving.end(saving.write(saving.shared(files), writer), save_latest)
        log_dist(f"saved checkpoint {saving.folder}", ranks=[0])
    return True


class Saving:
    """One checkpoint on its way to the disk. It keeps no tensor of the run: training may go on meanwhile."""

    def __init__(self, run, ranks, save_dir, tag, target, sharing=None):
        self.ranks, self.sharing = ranks, sharing
        self.save_dir, self.tag = save_dir, tag
        self.folder = os.path.join(save_dir, tag)
        self.target = target  # the real path of that folder
        self.staging = None  # where this rank's files are written, after ``begin``
        self.failed = f"the checkpoint {self.folder} is not saved, the one before it is unharmed"
        self._facts = facts_of(run, tag)
        self._with_script = run.policy.saved.optimizer_by_rank and not native.is_wanted(run)
        self._keep_last = run.config.checkpoint_config.keep_last
        self._in_place = run.config.checkpoint_config.write_in_place

    def agree(self, error, what=None, value=None, before_removal=None):
        """As ``Ranks.agree``, but that the hidden folder goes when a rank has an ``error``, after ``before_removal()``
        on all."""
        try:
            return self.ranks.agree(error, what or self.failed, value)
        except Exception:
            if before_removal is not None:
                before_removal()
                self.ranks.gather(None)
            if self.ranks.leads and self.staging is not None:
                commit.abandon(self.target, self.staging)
            self.ranks.gather(None)  # no rank goes on while files are still being removed
            raise

    def begin(self, meeting=None):
        """Makes the hidden folder, and the folder ``meeting``, if given, in which the ranks meet in the background."""

        def make():
            self.staging = commit.begin(self.target, self._in_place)
            if meeting is not None and self.ranks.size > 1:
                os.mkdir(meeting)
                owner.claim(meeting, lock=False)  # the last rank removes it, which would have to find a lock
            return self.staging

        self._began = time.monotonic()
        self.staging = self.ranks.lead(make, self.failed, self.agree)
        if self.staging == self.target:
            self.failed = (
                f"the checkpoint {self.folder} is not saved; it was written in place, so what was there is gone"
            )

    def shared(self, files):
        """``files``, with the one of which all data-parallel ranks have the same cut into parts. Every rank calls it,
        after ``begin``. A file system without hidden folders has no files with several writers: one rank writes it
        there."""
        sharing = self.sharing
        if sharing is None:
            return files
        if self.staging == self.target:
            self.sharing = None
            return {name: files[name] for name in files if name != sharing.name or sharing.leads or not sharing.writes}
        return sharing.cut(files, self.agree)

    def write(self, files, writer):
        """Writes the files of this rank through ``writer.write_file``. Returns name -> record for the manifest."""
        staging, records = self.staging or "", {}  # no folder for a writer that writes nothing

        def take(name, value):
            path = owner.make_way(staging, name) if staging else name
            records[name] = writer.write_file(name, value, path)

        error = take_each(files, take)
        if error is None and hasattr(writer, "finish"):
            records, error = attempt(writer.finish)
        self.agree(error)
        return records

    def end(self, records, save_latest):
        """All have written: the hidden folder becomes the checkpoint."""
        everyones = self.ranks.gather(records)
        if self.sharing is not None:
            records, error = attempt(lambda: self.sharing.complete(everyones, self.staging))
            everyones = self.agree(error, value=records)
        parts = (part for part, node in zip(everyones, self.ranks.nodes) if node == self.ranks.node)  # in this folder
        together = {name: record for part in parts for name, record in part.items()}
        self.ranks.lead(lambda: self._commit(together, save_latest), self.failed, self.agree)

    def end_behind(self, behind, save_latest, records, error):
        """As ``end``, in the thread of ``behind``, which tells of failures, and with ``RanksThroughFiles``. ``error``:
        what went wrong in writing here."""
        ranks = self.ranks
        try:
            self.agree(error)
            self.end(records, save_latest)
            if ranks.rank == 0:
                logger.info(f"saved checkpoint {self.folder} ({time.monotonic() - self._began:.1f} s after its begin)")
        except BaseException as caught:
            behind.fail(caught, lambda steps: [s for s in ranks.gather(steps) if s is not None])
        finally:
            ranks.close()

    def _commit(self, records, save_latest):
        commit.finish(self.target, self.staging, self._facts, records)
        if self._with_script:
            write_script(self.save_dir)
        if save_latest:
            replace_text(os.path.join(self.save_dir, names.LATEST), self.tag)
        if self._keep_last is not None:
            commit.retire(self.save_dir, self._keep_last, self.tag)
        if save_latest:
            tell_launcher(saved=self.target)


def facts_of(run, tag):
    """Facts of the run for the manifest of a checkpoint."""
    return {
        "tag": tag,
        "saved_at": time.time(),
        "ds_version": __version__,
        "torch": str(torch.__version__),
        "world_size": run.ranks.world_size,
        "dp_world_size": run.ranks.dp_world_size,
        "mp_world_size": run.ranks.mp_world_size,
        "zero_stage": run.config.zero_optimization_stage,
        "global_steps": run.counters.global_steps,
    }
