"""The operations per second of a matrix product: what a device can do at most."""

import contextlib
import fcntl
import os
import re

import torch

from deepspeed import _native
from deepspeed.utils.timer import device_time

_LONG = 0.003  # seconds of a product that is long enough to be measured
_TRIES = 3


def peak_flops(device, dtype):
    """Of a product of square matrices of ``dtype``, in flops per second. It is measured once on each machine, for each
    kind of device and number of threads, and kept in ``products`` beside ``~/.cache/deepspeed/rates``: the first
    process that asks measures, while others of the machine wait for it."""
    product = re.sub(r"\W+", "-", f"{_model(device)}-{dtype}-{torch.get_num_threads()}")
    rates = _native._C.rates_folder()
    folder = os.path.join(os.path.dirname(rates), "products") if rates else ""
    try:
        os.makedirs(folder, exist_ok=True)
        file = open(os.path.join(folder, product), "a+", encoding="ascii")  # noqa: SIM115
    except OSError:  # nothing can be kept here
        return _measured(device, dtype)
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        with contextlib.suppress(ValueError):
            return float(file.read())
        found = _measured(device, dtype)
        file.truncate(0)
        file.write(f"{found:.6g}\n")
    return found


def _model(device):
    """The model of the device, as torch's module for such devices says; else its type."""
    ask = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return device.type if ask is None else ask(device.index)


def _measured(device, dtype):
    size, seconds = 256, 0.0
    while seconds < _LONG:
        size *= 2
        seconds = _seconds(torch.ones(size, size, device=device, dtype=dtype))
    one = torch.ones(size, size, device=device, dtype=dtype)
    return 2 * size**3 / min(seconds, *(_seconds(one) for _ in range(_TRIES)))


def _seconds(one):
    begin = device_time()
    with torch.no_grad():
        one @ one
    return device_time() - begin
