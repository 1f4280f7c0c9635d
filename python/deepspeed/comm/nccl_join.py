"""Joins the ranks of an ``NcclCommunicator``: the library, the device, NCCL's id."""

import contextlib
import datetime
import functools
import json
import os
import sys
import time

import torch
import torch.distributed as dist

from deepspeed import _native
from deepspeed.accelerator import get_accelerator
from deepspeed.log import logger

_LIBRARY = os.path.join("nvidia", "nccl", "lib", "libnccl.so.2")


def moves_memory_of(accelerator):
    """Whether NCCL moves the memory of this accelerator, and there is one here."""
    return accelerator._name == "cuda" and accelerator.is_available()


def moves(backend, device):
    """Whether a torch group of this backend may move memory of ``device``, as far as its name tells."""
    return backend != "nccl" or device.type == "cuda"


def find_library(path=None):
    """The NCCL of this process, opened; ``path``: that file and no other. It has ``path``, ``version`` (22809 is
    2.28.9), ``version_text`` and ``has_buffers``. RuntimeError with all that was tried if there is none."""
    if path is not None:
        return _native._C.NcclLibrary.open(os.fspath(path))
    return _native._C.NcclLibrary.find([os.path.join(folder or ".", _LIBRARY) for folder in sys.path])


def introduce(group, name, rank, found, problem):
    """NCCL's id, which rank 0 makes, or the same RuntimeError on all ranks that tells whose NCCL cannot be used."""
    everybody = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, _facts(rank, found, problem), group=group)
    return _agreed(name, everybody)


def _facts(rank, found, problem):
    id = None
    if problem is None and rank == 0:
        try:
            id = found.make_id()
        except RuntimeError as error:
            problem = str(error)
    return problem, id, None if found is None else (found.version_text, found.path)


def _to_text(facts):
    problem, id, library = facts
    return json.dumps([problem, None if id is None else id.hex(), library])


def _from_text(text):
    # Anybody who reaches the job's store may have written it, so it is data and nothing that runs.
    try:
        problem, id, library = json.loads(text)
        return problem, None if id is None else bytes.fromhex(id), None if library is None else tuple(library)
    except (ValueError, TypeError) as error:
        raise RuntimeError(f"the job's store has no facts of NCCL from one of the ranks: {error}") from None


def _agreed(name, everybody):
    problems = [f"rank {r}: {theirs[0]}" for r, theirs in enumerate(everybody) if theirs[0] is not None]
    if problems:
        raise RuntimeError(f"the NCCL communicator {name!r} cannot be made. {' '.join(problems)}")
    libraries = [theirs[2] for theirs in everybody]
    if len({version for version, _ in libraries}) > 1:
        listed = "; ".join(f"rank {r}: {version} ({path})" for r, (version, path) in enumerate(libraries))
        raise RuntimeError(
            f"the NCCL communicator {name!r} cannot be made: the ranks have different versions of NCCL ({listed}). "
            f"Install the same one everywhere, or name the file with DS_NCCL_LIBRARY."
        )
    return everybody[0][1]


def find(device, library):
    """``(torch.device, library, problem)`` of a communicator on this rank; ``problem``: why there can be none.
    ``library``: a path; None is that of the accelerator, where it names one."""
    library = library or get_accelerator()._nccl_library
    try:
        return device_of(device, library), find_library(library), None
    except (RuntimeError, ValueError) as error:
        return None, None, f"{type(error).__name__}: {error}"


def join(found, id, name, rank, size, timeout, device):
    """The native communicator of those who have ``id``, on ``device``."""
    with on_device(device):
        return _native._C.NcclCommunicator(
            library=found,
            id=id,
            name=name,
            rank=rank,
            size=size,
            timeout=timeout,
            synchronize=functools.partial(_synchronize, device.type, device.index),
            device=str(device),
        )


def join_by_store(store, name, rank, size, timeout, device=None, library=None):
    """The same for ranks that have a store of their own and no group yet. None on all of them where one has no NCCL
    that can be used: the reason is logged."""
    target, found, problem = find(device, library)
    store.set(f"facts{rank}", _to_text(_facts(rank, found, problem)))
    everybody = _facts_of_all(store, name, size, timeout)
    try:
        id = _agreed(name, everybody)
    except RuntimeError as error:
        logger.warning("torch's own NCCL groups carry this engine: %s", error)
        return None
    return join(found, id, name, rank, size, timeout, target)


def _facts_of_all(store, name, size, timeout):
    # NCCL itself would not say who is missing.
    end, missing, found = time.monotonic() + timeout.total_seconds(), [], []
    for rank in range(size):
        try:
            store.wait([f"facts{rank}"], datetime.timedelta(seconds=max(end - time.monotonic(), 0.01)))
        except RuntimeError as error:
            missing.append(str(rank))
            reason = error
            continue
        found.append(_from_text(store.get(f"facts{rank}")))
    if missing:
        raise RuntimeError(
            f"the NCCL communicator {name!r} cannot be made: rank{'s' * (len(missing) > 1)} {', '.join(missing)} of "
            f"its {size} ranks did not come within {timeout.total_seconds():g} s"
        ) from reason
    return found


def on_device(device):
    return get_accelerator().device(device.index) if device.type != "cpu" else contextlib.nullcontext()


def _synchronize(kind, index):
    if kind != "cpu":
        get_accelerator().synchronize(index)


def device_of(device, library):
    """The ``torch.device``, with its index, whose memory a communicator is to move; ValueError where NCCL cannot."""
    accelerator = get_accelerator()
    found = torch.device(accelerator.current_device_name() if device is None else device)
    if library is None and (found.type != "cuda" or accelerator.communication_backend_name() != "nccl"):
        raise ValueError(
            f"NCCL moves memory of CUDA devices, and NcclCommunicator was to work on {found} (the accelerator here is "
            f"{accelerator.device_name()}). Use torch.distributed or deepspeed.comm there."
        )
    if found.type == "cuda" and found.index is None:
        found = torch.device(found.type, accelerator.current_device())
    return found
