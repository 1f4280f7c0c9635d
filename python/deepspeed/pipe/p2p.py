"""Messages between neighbouring stages of a ``PipelineParallelGrid``, for scripts with a pipeline of their own.

``PipelineEngine`` does not use this file: its messages are native (``csrc/comm/pipe``).
"""

import pickle

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.zero.nested import move_to_device

_grid = None
_pending = []


def can_send_recv():
    """Whether backends have send and recv. Always true here."""
    return True


def init_process_groups(grid):
    """``grid``: the ``PipelineParallelGrid`` whose stages ``send`` and ``recv`` count."""
    global _grid  # the published interface has one grid for each process
    _grid = grid


def _is_valid_send_recv(src_stage, dest_stage):
    first, last = 0, _grid.pipe_parallel_size - 1
    if abs(src_stage - dest_stage) != 1 and {src_stage, dest_stage} != {first, last}:
        raise ValueError(f"stages {src_stage} and {dest_stage} are not neighbours in a pipeline of {last + 1} stages")


def _rank_of(stage):
    if _grid is None:
        raise RuntimeError("p2p.init_process_groups(grid) must be called before send and recv")
    return _grid.stage_to_global(stage_id=stage)


def send(tensor, dest_stage, async_op=False):
    """Sends ``tensor`` to the same place of the stage ``dest_stage``. ``async_op``: ``wait`` ends it."""
    rank = _rank_of(dest_stage)
    _is_valid_send_recv(_grid.get_stage_id(), dest_stage)
    if not async_op:
        return dist.send(tensor, rank)
    _pending.append(dist.isend(tensor, rank))
    return _pending[-1]


def recv(tensor, src_stage, async_op=False):
    """Receives into ``tensor`` from the stage ``src_stage``. ``async_op``: ``wait`` ends it."""
    rank = _rank_of(src_stage)
    _is_valid_send_recv(src_stage, _grid.get_stage_id())
    if not async_op:
        return dist.recv(tensor, rank)
    _pending.append(dist.irecv(tensor, rank))
    return _pending[-1]


def wait():
    """Waits for all messages that were begun with ``async_op``."""
    while _pending:
        _pending.pop(0).wait()
    get_accelerator().synchronize()


def send_obj(msg, dest):
    """Sends an object that can be pickled to the rank ``dest``."""
    device = get_accelerator().current_device_name()
    data = torch.frombuffer(bytearray(pickle.dumps(msg)), dtype=torch.uint8).to(device)
    dist.send(torch.tensor([data.numel()], dtype=torch.int64, device=device), dst=dest)
    dist.send(data, dst=dest)


def recv_obj(sender):
    """Receives an object from the rank ``sender`` of this job, with its tensors on this device."""
    device = get_accelerator().current_device_name()
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(length, src=sender)
    data = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.recv(data, src=sender)
    return move_to_device(pickle.loads(data.cpu().numpy().tobytes()), device)
