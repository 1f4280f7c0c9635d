"""Checkpoints on disks of single nodes (``checkpoint.use_node_local_storage``): every node has what its ranks wrote.

What a node lacks for loading comes from the others through the process group, once, and stays on its disk.
"""

import os
import secrets

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.write import file_writer
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
    owner = {}  # file -> the first rank that can send it
    for rank, found in enumerate(have):
        for name in filter(names.is_checkpoint_file, found or ()):
            owner.setdefault(name, rank)
    wanted = ranks.gather(_wanted(run, owner))
    missing = {}  # file -> leading ranks that write it
    for rank, found in enumerate(have):
        if found is None:
            continue
        beside = [other for other in range(ranks.size) if ranks.nodes[other] == ranks.nodes[rank]]
        for name in set().union(*(wanted[other] for other in beside)) - set(found):
            missing.setdefault(name, []).append(rank)
    error = None
    for name in sorted(missing):
        path = path_below(folder, name, f"rank {owner[name]}", "entry")
        error = _send(ranks, path, owner[name], missing[name], run.device) or error
    if missing and ranks.rank == 0:
        logger.info(f"{len(missing)} files of {folder} were copied between nodes")
    ranks.agree(error, f"the checkpoint {folder} cannot be completed on the disk of a node")


def _wanted(run, files):
    saved_by = sum(names.SHARDED_MODEL_STATES.find(name) is not None for name in files)
    same = run.policy.saved.model_by_rank and saved_by == run.ranks.dp_world_size * run.ranks.mp_world_size
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
    error = out = source_file = own = None
    temporary = f"{path}.fetching.{secrets.token_hex(8)}"  # nobody can have put a link there
    try:
        if ranks.rank == source:
            source_file = open_regular(path)
            own = os.path.getsize(path)
    except OSError as caught:
        error = caught
    size = ranks.gather(own)[source]
    try:
        if ranks.rank in targets and size is not None:
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                out = open(temporary, "wb")
            except OSError as caught:
                error = caught
        for begin in range(0, size or 0, CHUNK_BYTES):
            chunk = torch.empty(min(CHUNK_BYTES, size - begin), dtype=torch.uint8)
            if source_file is not None and error is None:
                try:
                    if source_file.readinto(chunk.numpy()) != chunk.numel():
                        error = OSError(f"{path} became shorter while it was sent to another node")
                except OSError as caught:
                    error = caught
            chunk = chunk.to(device)
            dist.broadcast(chunk, source)
            if out is not None and error is None:
                try:
                    out.write(chunk.cpu().numpy())
                except OSError as caught:
                    error = caught
        failed = ranks.gather(error is not None)[source]
        if out is not None and error is None and not failed:
            out.flush()
            os.fsync(out.fileno())
            file_writer.rename(temporary, path)
    except OSError as caught:
        error = caught
    finally:
        for file in (out, source_file):
            if file is not None:
                file.close()
        if os.path.exists(temporary):
            os.unlink(temporary)
    return error
