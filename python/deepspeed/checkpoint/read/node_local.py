"""Checkpoints on disks of single nodes (``checkpoint.use_node_local_storage``): every node has what its ranks wrote.

What a node lacks for loading comes from the others through the process group, once, and stays on its disk.
"""

import contextlib
import functools
import os
import pathlib
import secrets

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.write import file_writer
from deepspeed.comm.agreement import attempt
from deepspeed.formats.recorded_paths import path_below
from deepspeed.host.recorded_names import open_regular
from deepspeed.log import logger

CHUNK_BYTES = 64 << 20


def fetch_missing(run, ranks, folder):
    """Makes sure that every node has the files of ``folder`` that its ranks will read. Every rank calls it.

    At stage 3, saved by as many ranks of stage 3, those are the ranks' own files and rank 0's; otherwise all. Raises
    OSError on all ranks where a file cannot be written.
    """
    if len(set(ranks.nodes)) == 1:
        return
    here = sorted(filter(names.is_checkpoint_file, os.listdir(folder))) if os.path.isdir(folder) else []
    have = ranks.gather(here if ranks.leads else None)
    leading = {
        rank: set(filter(names.is_checkpoint_file, found)) for rank, found in enumerate(have) if found is not None
    }
    # file -> the first rank that can send it
    owner = {name: rank for rank, found in reversed(leading.items()) for name in found}
    wanted = ranks.gather(_wanted(run, owner))
    missing = {}  # file -> leading ranks that write it
    for rank, found in leading.items():
        beside = [files for files, node in zip(wanted, ranks.nodes) if node == ranks.nodes[rank]]
        for name in set().union(*beside) - found:
            missing.setdefault(name, []).append(rank)
    error = None
    for name in sorted(missing):
        path = path_below(folder, name, f"rank {owner[name]}", "entry")
        error = _send(ranks, path, owner[name], missing[name], run.device) or error
    if missing and ranks.rank == 0:
        logger.info(f"{len(missing)} files of {folder} were copied between nodes")
    ranks.agree(error, f"the checkpoint {folder} cannot be completed on the disk of a node")


def _wanted(run, files):
    saved = [found for found in map(names.SHARDED_MODEL_STATES.find, files) if found is not None]
    slices = len({found["mp_rank"] for found in saved}) == run.ranks.mp_world_size
    same = run.policy.saved.model_by_rank and slices and len(saved) == run.ranks.dp_world_size * run.ranks.mp_world_size
    if not same or run.weights.differs:
        return sorted(files)
    return sorted(name for name in files if _is_own(name, run.ranks))


def _is_own(name, ranks):
    """Whether it is a file of this rank or of rank 0, whose files say what all ranks have in common."""
    found = names.RUN_STATES.find(name)
    if found is not None:
        return found["rank"] in (0, ranks.rank)
    found = names.SHARDED_MODEL_STATES.find(name) or names.OPTIM_STATES.find(name)
    return found is not None and found["mp_rank"] == ranks.mp_rank and found["dp_rank"] in (0, ranks.dp_rank)


def _send(ranks, path, source, targets, device):
    """One file from rank ``source`` to the disks of ``targets``. Returns the error of this rank, or None. After an
    error this rank still takes part in every exchange, because the others wait for it."""
    error = None
    temporary = f"{path}.fetching.{secrets.token_hex(8)}"  # nobody can have put a link there

    def step(function):
        """Returns the result of the call. After an error, which is remembered, nothing is called."""
        nonlocal error
        if error is None:
            found, error = attempt(function, OSError)
            return found

    def read(chunk):
        if source_file.readinto(chunk.numpy()) != chunk.numel():
            raise OSError(f"{path} became shorter while it was sent to another node")

    def finish():
        out.flush()
        os.fsync(out.fileno())
        file_writer.rename(temporary, path)

    with contextlib.ExitStack() as files:
        own = source_file = out = None
        if ranks.rank == source:
            source_file = step(lambda: files.enter_context(open_regular(path)))
            own = step(lambda: os.path.getsize(path))
        size = ranks.gather(own)[source]
        if ranks.rank in targets and size is not None:
            step(lambda: os.makedirs(os.path.dirname(path), exist_ok=True))
            files.callback(pathlib.Path(temporary).unlink, missing_ok=True)
            out = step(lambda: files.enter_context(open(temporary, "wb")))
        for begin in range(0, size or 0, CHUNK_BYTES):
            chunk = torch.empty(min(CHUNK_BYTES, size - begin), dtype=torch.uint8)
            if source_file is not None:
                step(functools.partial(read, chunk))
            chunk = chunk.to(device)
            dist.broadcast(chunk, source)
            if out is not None:
                step(functools.partial(out.write, chunk.cpu().numpy()))
        if not ranks.gather(error is not None)[source] and out is not None:
            step(finish)
    return error
