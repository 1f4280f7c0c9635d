"""Times of operators, each of which runs on a device of this machine, with arguments of the same shapes."""

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from deepspeed._native import _C
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.token_rows import ops
from deepspeed.planner.child import run_anew

_RUNS, _LEAST = 5, 2e-3  # the median of _RUNS runs, each of which takes at least _LEAST seconds
_ATTENTION = "aten::_scaled_dot_product_"


class Operand(NamedTuple):
    """A tensor without its values."""

    shape: tuple
    stride: tuple
    dtype: torch.dtype


class Named(NamedTuple):
    """An attribute of torch that cannot be pickled: a memory format or a layout."""

    name: str


def call_of(name, args, kwargs):
    """A call of an operator as a key of a dict: equal calls take equal time."""
    return name, _plain(args), tuple((key, _plain(value)) for key, value in kwargs.items())


def _plain(value):
    if isinstance(value, torch.Tensor):
        return Operand(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, (torch.memory_format, torch.layout)):
        return Named(str(value).rpartition(".")[2])
    return None if isinstance(value, (torch.device, torch.Generator)) else value


def _made(value, device):
    """Numbers are zeros, which are indices, too; those with a fraction are random."""
    if isinstance(value, Operand):
        room = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride))  # parts may be one in memory
        made = torch.empty(room, dtype=value.dtype, device=device)
        made = made.uniform_(0.1, 1) if made.is_floating_point() else made.zero_()
        return made.as_strided(value.shape, value.stride)
    if isinstance(value, Named):
        return getattr(torch, value.name)
    return tuple(_made(one, device) for one in value) if isinstance(value, tuple) else value


def nanoseconds(calls, ranks):
    """``{call: nanoseconds}``, None for a call that cannot run here. As many processes measure at the same time as
    there are cores, at most ``ranks``, because ranks of one host share its memory; where there are more ranks, they
    share cores, too."""
    cores = len(os.sched_getaffinity(0))
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, cores // ranks))
    on_cpu = get_accelerator().device_name() == "cpu"
    count, longer = (max(1, min(ranks, cores // threads)), max(1, ranks * threads / cores)) if on_cpu else (1, 1)
    with ThreadPoolExecutor(count) as pool:
        rows = list(pool.map(lambda _: run_anew(_run, (list(calls),), threads), range(count)))
    return {call: None if None in times else longer * statistics.mean(times) for call, times in zip(calls, zip(*rows))}


def _run(calls):
    """The work of a process: nanoseconds of each call, None where it fails."""
    _C.memory.keep_freed_memory()  # as an engine does it
    device = get_accelerator().current_device_name()
    return [_time(call, device) for call in calls]


def _time(call, device):
    try:
        run = _runnable(*call, device)
        run(), _seconds(run, 1)
        repeats = max(3, min(1000, round(_LEAST / _seconds(run, 1))))
        return 1e9 * statistics.median(_seconds(run, repeats) for _ in range(_RUNS))
    except Exception:  # an operator that another device has, or whose arguments must have other values
        return None


def _seconds(run, repeats):
    kept = []  # results, as a backward keeps them: no cache has their memory yet
    get_accelerator().synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        kept.append(run())
    get_accelerator().synchronize()
    return (time.perf_counter() - begin) / repeats


def _runnable(name, args, kwargs, device):
    args, kwargs = _made(args, device), {key: _made(value, device) for key, value in kwargs}
    space, _, word = name.partition("::")
    if name == "deepspeed::grouped_linear":
        x, weights = args
        return lambda: ops().grouped_linear(x, [len(x) // len(weights)] * len(weights), list(weights))
    operator = getattr(getattr(torch.ops, space), word)
    if "device" in kwargs:
        kwargs["device"] = device
    if not name.startswith(_ATTENTION):
        return lambda: operator(*args, **kwargs)
    names = (one.name for one in operator.default._schema.arguments)
    return _attention(word.endswith("_backward"), dict(zip(names, args)))


def _attention(backward, given):
    """The kernel that torch takes on this device."""
    inputs = [given[name].requires_grad_(backward) for name in ("query", "key", "value")]
    with torch.set_grad_enabled(backward):
        rules = given.get("attn_bias"), given.get("dropout_p", 0.0), given.get("is_causal", False)

        def run():
            return torch.nn.functional.scaled_dot_product_attention(*inputs, *rules)

    if not backward:
        return run
    out = run()
    grad = given.get("grad_out", given.get("grad_out_"))
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)
