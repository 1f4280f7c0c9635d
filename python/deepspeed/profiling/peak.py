"""The operations per second of a matrix product, which is what a device can do at most, and of attention."""

import contextlib
import fcntl
import functools
import os
import re

import torch

from deepspeed import _native
from deepspeed.utils.timer import device_time

_LONG = 0.003  # seconds of a product that is long enough to be measured
_TRIES = 4


def peak_flops(device, dtype):
    """The peak of a product of square matrices of ``dtype``, in flops per second, measured once on each machine for
    each kind of device and number of threads (``measured_once``)."""
    return measured_once("products", rate_name(device, dtype), lambda: _measured(_product, device, dtype))


def attention_flops(device, dtype):
    """The rate of the forward and the backward of fused attention, in flops per second; 0 where torch has no such
    operator, or has none for this device and dtype. Other errors are raised, such as those of a device without free
    memory."""
    if not hasattr(torch.nn.functional, "scaled_dot_product_attention"):
        return 0.0
    try:
        return _measured(_attention, device, dtype)
    except NotImplementedError:
        return 0.0


def rate_name(device, dtype):
    """A name for a rate of a device, as this process uses it."""
    return f"{device_model(device)}-{dtype}-{torch.get_num_threads()}"


def measured_once(kind, name, measure):
    """The number ``measure()``. It is kept in the folder ``kind`` beside ``~/.cache/deepspeed/rates``: the first
    process that asks measures, while others of the machine wait for it."""
    rates = _native._C.rates_folder()
    folder = os.path.join(os.path.dirname(rates), kind) if rates else ""
    try:
        os.makedirs(folder, exist_ok=True)
        file = open(os.path.join(folder, re.sub(r"\W+", "-", name)), "a+", encoding="ascii")  # noqa: SIM115
    except OSError:  # nothing can be kept here
        return measure()
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        with contextlib.suppress(ValueError):
            return float(file.read())
        found = measure()
        file.truncate(0)
        file.write(f"{found:.9g}\n")
    return found


def device_model(device):
    """The model of the device, as torch's module for such devices says; else its type."""
    ask = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return device.type if ask is None else ask(device.index)


def _measured(make, device, dtype):
    """Flops per second of ``make(device, dtype, scale)``, a pair of a function and its flops, at the first scale that
    takes long enough. The first calls of a process prepare the device, and do not count."""
    scale, seconds = 1, 0.0
    while seconds < _LONG:
        scale *= 2
        run, flops = make(device, dtype, scale)
        seconds = min(_seconds(run) for _ in range(_TRIES))
    return flops / seconds


def _seconds(run):
    begin = device_time()
    run()
    return device_time() - begin


def _product(device, dtype, scale):
    """Random numbers: some devices multiply equal ones faster."""
    size = 256 * scale
    one = torch.rand(size, size, device=device).to(dtype)
    return functools.partial(torch.matmul, one, one), 2 * size**3


def _attention(device, dtype, scale):
    batch, heads, tokens, width = 2, 8, 64 * scale, 64
    inputs = [torch.rand(batch, heads, tokens, width, device=device).to(dtype).requires_grad_() for _ in range(3)]

    def run():
        with torch.enable_grad():
            torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True).sum().backward()

    products = 2 + 5  # of the forward, and of the backward, which computes the scores again
    return run, products * 2 * batch * heads * tokens**2 * width
