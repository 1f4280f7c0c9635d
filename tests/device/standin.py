"""The stand-in device: a device of torch 2 that runs on the CPU, with memory, streams and events that behave as CUDA's.

    import standin
    standin.load()                        # torch.device("standin:0") and "standin:1", the module torch.standin
    standin.choose(seed=7, lazy=True)     # how queued work is put off; seed 0: not at all
    standin.choose(null=True)             # queued work does not run: a program takes the time of its host alone
    standin.reset_counts()                # ... a step ...
    standin.counts()                      # what it has asked of the devices: {"operations": 12, "host waits": 1, ...}
    with standin.no_faults():             # raises where the order of operations has a fault
        ...
    set_accelerator(standin.Standin_Accelerator())

DS_STANDIN_SEED, DS_STANDIN_MODE (lazy or null), DS_STANDIN_MEMORY (bytes of a device) and DS_STANDIN_STACKS (python:
stacks of Python beside those of C++) say the same for a whole process.
DS_STANDIN_KERNELS=standin_kernels.library_path() gives it the CUDA kernels, DS_STANDIN_NCCL=fake_nccl.build(folder) a
library with NCCL's interface, which engines then call.
tests/device/*.h says what the device does.
"""

import atexit
import contextlib
import ctypes
import os
import sys
import types

import torch

from deepspeed.accelerator.abstract_accelerator import constant
from deepspeed.accelerator.torch_module import TorchModuleAccelerator
from deepspeed.host.vendors import Vendor

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DEVICES = 2
# The name of the devices in torch. With DS_STANDIN_TYPE=hpu the devices have torch's own type of Gaudi, and the package
# tests/device/habana has their functions.
NAME = os.environ.get("DS_STANDIN_TYPE", "standin")
KIND = {"standin": 20, "hpu": 15}[NAME]  # c10::DeviceType: PrivateUse1, HPU
_library = None
_kernels, _finished = {}, []  # functions of Python that are queued as kernels


def supported():
    """Whether this torch has what the stand-in is made of."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 9)


def library_path():
    """The path at which CMake puts the library for this Python and torch; DS_STANDIN_LIBRARY names another."""
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}-torch{torch.__version__.split('+')[0]}"
    file = "libstandin.so" if NAME == "standin" else f"libstandin_{NAME}.so"
    return os.environ.get("DS_STANDIN_LIBRARY") or os.path.join(ROOT, "build", tag, "bin", file)


def hpu_environment():
    """Variables of a process in which the devices are Gaudi's: torch's type hpu and the package habana_frameworks."""
    library = os.path.join(os.path.dirname(library_path()), "libstandin_hpu.so")
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "habana")
    path = os.pathsep.join(filter(None, [folder, os.path.join(ROOT, "python"), os.environ.get("PYTHONPATH")]))
    return {"DS_STANDIN_TYPE": "hpu", "DS_STANDIN_LIBRARY": library, "DS_ACCELERATOR": "hpu", "PYTHONPATH": path}


def load():
    """Makes the devices of this process, once. Torch knows them from then on under the name ``NAME``."""
    global _library
    if _library is not None:
        return _library
    if NAME == "standin":
        torch.utils.rename_privateuse1_backend("standin")
    torch.ops.load_library(library_path())
    _library = ctypes.CDLL(library_path())
    _library.standin_fault.restype = _library.standin_launch.restype = ctypes.c_char_p
    _library.standin_place.restype = _library.standin_use_nccl.restype = ctypes.c_char_p
    _library.standin_choose.argtypes = (ctypes.c_uint64, ctypes.c_int)
    _library.standin_graph_begin.restype = ctypes.c_void_p
    _library.standin_graph_replay.argtypes = _library.standin_graph_free.argtypes = (ctypes.c_void_p,)
    _library.standin_count_name.restype = _library.standin_host_wait.restype = ctypes.c_char_p
    _library.standin_count.restype = ctypes.c_uint64
    _library.standin_limit.argtypes = (ctypes.c_int, ctypes.c_size_t)
    _library.standin_launch.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p)
    torch._register_device_module(NAME, _module())
    if NAME == "standin":
        torch.utils.generate_methods_for_privateuse1_backend()
    torch.empty(0, device=NAME)  # from here on torch takes the devices as initialised
    atexit.register(_library.standin_end)
    return _library


def choose(seed=0, lazy=False, null=False):
    """Sets the delay of operations that are queued from now on. ``null``: they do not run, so that values are whatever
    is in memory, and nothing is checked; numbers by which programs decide are small, and run in the call."""
    load().standin_choose(seed, 2 if null else int(lazy))


def counts():
    """Counts of calls of the code under test since the last ``reset_counts``, by the names of counts.h."""
    library, found = load(), {}
    while name := library.standin_count_name(len(found)):
        found[name.decode()] = library.standin_count(len(found))
    return found


def reset_counts(stacks=False):
    """Counts from now on. ``stacks``: ``host_waits`` knows the stacks of the waits that follow."""
    load().standin_reset_counts(int(stacks))


def host_waits():
    """The stack of each wait of the host since ``reset_counts(stacks=True)``."""
    found = []
    while text := load().standin_host_wait(len(found)):
        found.append(text.decode())
    return found


def limit(size, device=0):
    """The bytes that a device has."""
    load().standin_limit(device, size)


def faults(clear=False):
    """The texts of what was found: accesses without an order, accesses of the host that came too early."""
    library = load()
    texts = [library.standin_fault(index).decode() for index in range(library.standin_faults(0))]
    if clear:
        library.standin_faults(1)
    return texts


WAITS = ("stream wait", "kept memory", "host wait")
LIST = -1


def leave_out(kind, number):
    """The ``number``-th call of a kind of WAITS from now on does nothing. 0: none; LIST: none, ``place`` knows all."""
    load().standin_leave_out(WAITS.index(kind), number)


def waits(kind):
    """The number of calls of the kind since ``leave_out``."""
    return load().standin_waits(WAITS.index(kind))


def place(kind, number):
    """The stack of a call that was left out, or that was listed."""
    return load().standin_place(WAITS.index(kind), number).decode()


_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def launch(function, name, stream=None):
    """Queues a function that uses pointers of tensors, as a kernel does; None: on the current stream."""
    key = object()

    def run(_):
        try:
            function()
        finally:
            _finished.append(key)

    while _finished:
        _kernels.pop(_finished.pop(), None)
    _kernels[key] = _KERNEL(run)
    handle = None if stream is None else stream.native_handle
    error = load().standin_launch(handle, name.encode(), _kernels[key], None)
    if error:
        raise RuntimeError(error.decode())


def fill(tensor, value):
    """A kernel: `value` into all elements of a contiguous fp32 tensor, through its pointer."""
    (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())[:] = [value] * tensor.numel()


def faults_at_end():
    """The texts of what was found since the last time, when all devices have finished."""
    for device in range(DEVICES):
        torch.accelerator.synchronize(device)
    return faults(clear=True)


class OrderFault(AssertionError):
    """Operations of the stand-in device have no order."""


@contextlib.contextmanager
def no_faults():
    """A context at whose end all devices have finished; OrderFault names what was found in it."""
    faults(clear=True)
    yield
    found = faults_at_end()
    if found:
        raise OrderFault("\n".join(found))


def _index(device):
    if device is None:
        return torch.accelerator.current_device_index()
    return device if isinstance(device, int) else torch.device(device).index or 0


def _figures(device=None):
    five = (ctypes.c_uint64 * 5)()
    load().standin_figures(_index(device), five)
    return list(five)


class Graph:
    """Operations that are recorded in a context of ``graph``, and that ``replay`` queues on the current stream."""

    _handle = None

    def replay(self):
        load().standin_graph_replay(self._handle)

    def __del__(self):
        if self._handle is not None:
            load().standin_graph_free(self._handle)


@contextlib.contextmanager
def graph(made, pool=None, stream=None):
    """Records into ``made``, a ``Graph``; nothing is computed meanwhile."""
    made._handle = load().standin_graph_begin()
    try:
        yield
    finally:
        load().standin_graph_end()


def allocated():
    """Bytes of all devices."""
    return sum(_figures(device)[0] for device in range(DEVICES))


def _module():
    """torch.standin or torch.hpu: the functions of torch.cuda that device-independent code uses."""
    module = types.ModuleType(f"torch.{NAME}", "The stand-in device of tests/device.")
    generators = tuple(torch.ops.standin.default_generator(index) for index in range(DEVICES))

    def memory_stats(device=None):
        allocated, allocated_peak, reserved, reserved_peak, _ = _figures(device)
        return {
            "allocated_bytes.all.current": allocated,
            "allocated_bytes.all.peak": allocated_peak,
            "reserved_bytes.all.current": reserved,
            "reserved_bytes.all.peak": reserved_peak,
        }

    def manual_seed_all(seed):
        for generator in generators:
            generator.manual_seed(seed)

    module.__dict__.update(
        device=lambda device: torch.accelerator.device_index(_index(device)),
        Stream=lambda device=None, **options: torch.Stream(f"{NAME}:{_index(device)}", **options),
        Event=lambda enable_timing=False, **_: torch.Event(NAME, enable_timing=enable_timing),
        stream=lambda stream: contextlib.nullcontext() if stream is None else stream,
        current_stream=lambda device=None: torch.accelerator.current_stream(_index(device)),
        default_stream=lambda device=None: torch.Stream(stream_id=0, device_index=_index(device), device_type=KIND),
        set_stream=torch.accelerator.set_stream,
        synchronize=lambda device=None: torch.accelerator.synchronize(_index(device)),
        current_device=torch.accelerator.current_device_index,
        set_device=lambda device: torch.accelerator.set_device_index(_index(device)),
        device_count=lambda: DEVICES,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,  # without it torch.accelerator.synchronize() does not wait
        _lazy_call=lambda callback: callback(),
        empty_cache=lambda: load().standin_empty_cache(),
        memory_allocated=lambda device=None: _figures(device)[0],
        max_memory_allocated=lambda device=None: _figures(device)[1],
        memory_reserved=lambda device=None: _figures(device)[2],
        max_memory_reserved=lambda device=None: _figures(device)[3],
        mem_get_info=lambda device=None: (_figures(device)[4] - _figures(device)[2], _figures(device)[4]),
        memory_stats=memory_stats,
        reset_peak_memory_stats=lambda device=None: load().standin_new_peaks(_index(device)),
        default_generators=generators,
        manual_seed=lambda seed: generators[_index(None)].manual_seed(seed),
        manual_seed_all=manual_seed_all,
        initial_seed=lambda: generators[_index(None)].initial_seed(),
        get_rng_state=lambda device=None: generators[_index(device)].get_state(),
        set_rng_state=lambda state, device=None: generators[_index(device)].set_state(state),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        graph=graph,
        is_current_stream_capturing=lambda: bool(load().standin_graph_recording()),
        **{f"{NAME.upper()}Graph": Graph},
    )
    return module


class Standin_Accelerator(TorchModuleAccelerator):
    """torch.standin as an accelerator: that of CUDA in all that a training run asks."""

    _name = "standin"
    _vendor = Vendor("standin", "torch", "torch.standin", (("gloo", ""),))

    def __init__(self):
        load()
        super().__init__()

    @property
    def _nccl_library(self):
        path = os.environ.get("DS_STANDIN_NCCL")
        if path and (why := load().standin_use_nccl(path.encode())):
            raise OSError(why.decode())
        return path

    is_available = constant(True)

    def total_memory(self, device_index=None):
        return torch.standin.mem_get_info(device_index)[1]
