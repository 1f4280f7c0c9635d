"""Collectives on CPU tensors that torch's gloo backend lacks, built from those it has, on every torch alike.

Gloo moves bytes for any dtype but knows only some: data movement goes as a uint8 view, reductions of the other dtypes
are staged in a wider one. AVG is a sum and a division. reduce_scatter is an all-to-all and a local reduction, which
sums low-precision values in fp32 and moves no more bytes than a ring would. Tensors must be contiguous. Empty ones are
not sent at all: gloo divides by their size in some versions, and the process dies.
"""

import torch
import torch.distributed as dist

from deepspeed.comm.c10d_watch import end, wait
from deepspeed.comm.reduce_op import to_name
from deepspeed.comm.work import complete

_NATIVE = {torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64}
FLOAT8 = {getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)}
_LOW_FLOATS = {torch.bfloat16, torch.float16} | FLOAT8
_BITWISE = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
# From here on an all-reduce of a low-precision dtype is worth two steps.
_LARGE_BYTES = 1 << 16
# On truth values addition is "or" and multiplication is "and", as NCCL has it.
_BOOL_AS = {"SUM": "MAX", "AVG": "MAX", "PRODUCT": "MIN"}


def serves(group, tensor):
    """True when gloo carries this group's tensors of ``tensor``'s device; False for who is no member of the group."""
    if tensor.device.type != "cpu" or (group is not None and dist.get_rank(group) < 0):
        return False
    name = dist.get_backend(group)
    if name == "gloo":
        return True
    if "gloo" not in str(name) and name != "undefined":
        return False
    pg = group if group is not None else dist.group.WORLD
    return hasattr(pg, "_get_backend") and pg._get_backend(torch.device("cpu")).name() == "gloo"


def as_known(tensor):
    """``tensor``, or its bytes with the same first dimension where gloo does not know the dtype."""
    if tensor.dtype in _NATIVE:
        return tensor
    if not tensor.is_contiguous():
        raise ValueError(
            f"collectives need contiguous tensors, got strides {tensor.stride()} for shape {tuple(tensor.shape)}: "
            f"pass tensor.contiguous() and copy the result back."
        )
    return tensor.unsqueeze(-1).view(torch.uint8)


def _staging_dtype(dtype, name):
    if dtype in _LOW_FLOATS and (dtype != torch.float16 or name == "AVG"):
        return torch.float32
    if dtype == torch.int16:
        return torch.int32
    return torch.uint8 if dtype == torch.bool else None


def _divide(tensor, size):
    tensor.div_(size) if tensor.is_floating_point() else tensor.div_(size, rounding_mode="trunc")


def _staged(tensor, op, size):
    # (buffer to reduce, torch op, what to do on the buffer afterwards)
    name = to_name(op)
    if tensor.dtype == torch.bool:
        name = _BOOL_AS.get(name, name)
    stage = _staging_dtype(tensor.dtype, name)
    buffer = tensor if stage is None else tensor.to(stage)

    def finish():
        if name == "AVG":
            _divide(buffer, size)
        if buffer is not tensor:
            tensor.copy_(buffer)

    return buffer, getattr(dist.ReduceOp, "SUM" if name == "AVG" else name), finish


def all_reduce(tensor, op, group, async_op):
    if tensor.numel() == 0:
        return complete([], None, async_op)
    if not async_op and tensor.dtype in _LOW_FLOATS and tensor.dtype != torch.float16:
        if tensor.numel() * tensor.element_size() >= _LARGE_BYTES and dist.get_world_size(group) > 1:
            return _all_reduce_in_two_steps(tensor, op, group)
    buffer, torch_op, finish = _staged(tensor, op, dist.get_world_size(group))
    work = dist.all_reduce(buffer, torch_op, group=group, async_op=True)
    return None if work is None else complete([work], finish, async_op, wait)


def _all_reduce_in_two_steps(tensor, op, group):
    # Half the bytes of a staged fp32 all-reduce, and as exact. Not for async_op: the second step would start inside
    # wait(), and nothing makes the ranks wait in the same order.
    size, count = dist.get_world_size(group), tensor.numel()
    flat = tensor.contiguous().view(-1)
    padding = -count % size
    padded = torch.cat([flat, flat.new_zeros(padding)]) if padding else flat
    part = flat.new_empty(padded.numel() // size)
    reduce_scatter_tensor(part, padded, op, group, async_op=False)
    all_gather_into_tensor(padded, part, group, async_op=False)
    if padded.data_ptr() != tensor.data_ptr():
        tensor.copy_(padded[:count].view_as(tensor))


def reduce(tensor, dst, op, group, async_op):
    if tensor.numel() == 0:
        return complete([], None, async_op)
    buffer, torch_op, finish = _staged(tensor, op, dist.get_world_size(group))
    work = dist.reduce(buffer, dst, torch_op, group=group, async_op=True)
    if work is None:
        return None
    # Only dst gets a result; the others' tensors stay as they were.
    return complete([work], finish if dist.get_rank() == dst else None, async_op, wait)


def _reduce_rows(rows, name):
    if rows.dtype == torch.bool:
        return rows.any(0) if name in ("SUM", "AVG", "MAX", "BOR") else _reduce_bool_rows(rows, name)
    if name in _BITWISE:
        total = rows[0].clone()
        for row in rows[1:]:
            _BITWISE[name](total, row, out=total)
        return total
    if rows.dtype in _LOW_FLOATS:
        rows = rows.float()
    if name in ("MIN", "MAX"):
        return rows.amin(0) if name == "MIN" else rows.amax(0)
    total = rows.prod(0, dtype=rows.dtype) if name == "PRODUCT" else rows.sum(0, dtype=rows.dtype)
    if name == "AVG":
        _divide(total, rows.shape[0])
    return total


def _reduce_bool_rows(rows, name):
    return rows.sum(0).remainder(2).bool() if name == "BXOR" else rows.all(0)


def reduce_scatter_tensor(output, tensor, op, group, async_op):
    """``output`` gets this rank's share of the sum over ranks of ``tensor`` (world size times as many elements)."""
    name, size = to_name(op), dist.get_world_size(group)
    if tensor.numel() != output.numel() * size:
        raise ValueError(
            f"reduce_scatter_tensor: the input has {tensor.numel()} elements, the output {output.numel()}; over "
            f"{size} ranks the input must have {output.numel() * size}."
        )
    if output.numel() == 0:
        return complete([], None, async_op)
    source = tensor.contiguous().view(size, output.numel())
    received = torch.empty_like(source)
    work = dist.all_to_all_single(as_known(received), as_known(source), group=group, async_op=True)

    def finish():
        output.copy_(_reduce_rows(received, name).view_as(output))

    return None if work is None else complete([work], finish, async_op, wait)


def reduce_scatter(output, input_list, op, group, async_op):
    return reduce_scatter_tensor(output, torch.cat([one.reshape(-1) for one in input_list]), op, group, async_op)


def all_gather_into_tensor(output, tensor, group, async_op):
    """``output`` (contiguous, world size times as many elements) gets the ranks' tensors one after the other."""
    size = dist.get_world_size(group)
    if output.numel() != tensor.numel() * size:
        raise ValueError(
            f"all_gather_into_tensor: the output has {output.numel()} elements, the input {tensor.numel()}; over "
            f"{size} ranks the output must have {tensor.numel() * size}."
        )
    if tensor.numel() == 0:
        return complete([], None, async_op)
    parts = as_known(output.view(size, tensor.numel())).unbind(0)
    work = dist.all_gather(list(parts), as_known(tensor.contiguous().view(-1)), group=group, async_op=True)
    return end(work, async_op)


def all_to_all(output_list, input_list, group, async_op):
    """Lists of tensors of any shapes and one dtype: ``output_list[r]`` gets what rank r had for this rank."""
    source = torch.cat([one.reshape(-1) for one in input_list])
    received = source.new_empty(sum(one.numel() for one in output_list))
    sizes = [[one.numel() for one in some] for some in (output_list, input_list)]
    work = dist.all_to_all_single(as_known(received), as_known(source), *sizes, group=group, async_op=True)

    def finish():
        for target, part in zip(output_list, received.split(sizes[0]), strict=True):
            target.copy_(part.view_as(target))

    return None if work is None else complete([work], finish, async_op, wait)
