"""The operations per second of a matrix product: what a device can do at most."""

import contextlib
import fcntl
import os
import re

import torch

from deepspeed import _native
from deepspeed.utils.timer import device_time

_LONG = 0.003  # seconds of a product that is long enough to be measured
_TRIES = 4


def peak_flops(device, dtype):
    """Of a product of square matrices of ``dtype``, in flops per second, measured once on each machine for each kind
    of device and number of threads (``measured_once``)."""
    name = f"{device_model(device)}-{dtype}-{torch.get_num_threads()}"
    return measured_once("products", name, lambda: _measured(device, dtype))


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


def _measured(device, dtype):
    """The first products of a process prepare the device, and do not count. Random numbers: some devices multiply
    equal ones faster."""
    size, seconds = 256, 0.0
    while seconds < _LONG:
        size *= 2
        one = torch.rand(size, size, device=device).to(dtype)
        seconds = min(_seconds(one) for _ in range(_TRIES))
    return 2 * size**3 / seconds


def _seconds(one):
    begin = device_time()
    with torch.no_grad():
        one @ one
    return device_time() - begin
