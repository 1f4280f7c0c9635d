"""Reductions of several tensors of which each rank gets its part of the mean, as one exchange."""

import torch
import torch.distributed as dist

from deepspeed import _native
from deepspeed.comm.collectives import reduce_scatter_tensor
from deepspeed.comm.group_communicators import native_of


@torch.no_grad()
def reduce_scatter_coalesced(tensors, group=None):
    """Averages every tensor over the ranks of ``group`` (None: all ranks) by one reduce-scatter.

    A flattened tensor of n elements is cut into parts of ceil(n / ranks), of which the last ones may be shorter or
    empty. The tensors must have one dtype.

    Returns:
        for each tensor, this rank's part of the mean.
    """
    rows = _rows(tensors, dist.get_world_size(group))
    if rows is None:
        return []
    row = rows.new_empty(rows.shape[1])
    reduce_scatter_tensor(row, rows.view(-1), group=group)
    return _parts(row.div_(len(rows)), tensors, dist.get_rank(group), len(rows))


@torch.no_grad()
def all_to_all_quant_reduce(tensors, groups):
    """Averages every tensor over all ranks, as ``reduce_scatter_coalesced`` does. Tensors of two dimensions and more
    travel as blocks of integers (qgZ of ZeRO++), those of one dimension whole.

    ``groups`` has the process groups ``local_<i>`` of the ranks of host i and ``global_<j>`` of the ranks with place j
    on their hosts, where ranks are numbered host by host. Values then have 8 bits inside a host and 4 between hosts. If
    ``groups`` is empty there is one exchange among all ranks, with 8 bits.

    Returns:
        for each tensor, this rank's part of the mean.
    """
    wide = [tensor for tensor in tensors if tensor.dim() > 1]
    parts = {id(tensor): part for tensor, part in zip(wide, _coded(wide, groups))}
    narrow = [tensor for tensor in tensors if tensor.dim() <= 1]
    parts.update((id(tensor), part) for tensor, part in zip(narrow, reduce_scatter_coalesced(narrow)))
    return [parts[id(tensor)] for tensor in tensors]


def _coded(tensors, groups):
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = _rows(tensors, size)
    if rows is None:
        return []
    inner = outer = None
    hosts, place = [list(range(size))], (0, rank)
    if groups:
        width = sum(name.startswith("global_") for name in groups)
        if width == 0 or size % width or any(f"local_{host}" not in groups for host in range(size // width)):
            raise ValueError(
                f"all_to_all_quant_reduce got the groups {sorted(groups)}; for {size} ranks they must be global_0 to "
                f"global_<k - 1> and local_0 to local_<{size} / k - 1>, with k ranks on each host."
            )
        hosts = [list(range(first, first + width)) for first in range(0, size, width)]
        place = (rank // width, rank % width)
        if 1 < width < size:
            inner, outer = (
                native_of(groups[name], rows) for name in (f"local_{place[0]}", f"global_{place[1]}")
            )
    row = _native._C.block_reduce(
        ranks=native_of(None, rows),
        inner=inner,
        outer=outer,
        hosts=hosts,
        place=place,
        rows=rows,
        threads=torch.get_num_threads(),
    )
    return _parts(row.div_(size), tensors, rank, size)


def _rows(tensors, ranks):
    """A row for each rank, with its part of every tensor; None without tensors."""
    if not tensors:
        return None
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError(
            f"tensors that are reduced together must have one dtype, got "
            f"{sorted({str(tensor.dtype) for tensor in tensors})}; call the function once for each dtype."
        )
    parts = []
    for tensor in tensors:
        flat = tensor.reshape(-1)
        parts.append(torch.nn.functional.pad(flat, (0, -flat.numel() % ranks)).view(ranks, -1))
    return torch.cat(parts, 1).contiguous()


def _parts(row, tensors, rank, ranks):
    found, begin = [], 0
    for tensor in tensors:
        width = -(-tensor.numel() // ranks)
        own = max(0, min(width, tensor.numel() - rank * width))
        found.append(row[begin : begin + own])
        begin += width
    return found
