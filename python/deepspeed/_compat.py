"""Every difference between torch 1.13 and 2.x that the Python code meets."""

import contextlib
import functools
import inspect
import sys

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.cuda import amp as cuda_amp  # two decorators, of every device on torch 1.13

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
TORCH2 = VERSION >= (2, 0)
# The C++ standard of torch's headers.
CXX_STANDARD = 20 if VERSION >= (2, 14) else 17


def named_parameters(module):
    """All names of all parameters, tied ones under each of their names."""
    if "remove_duplicate" in inspect.signature(torch.nn.Module.named_parameters).parameters:
        yield from module.named_parameters(remove_duplicate=False)
        return
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, param in child._parameters.items():
            if param is not None:
                yield (f"{prefix}.{name}" if prefix else name), param


def backward_id():
    """A number that tells running backward passes apart, or None where torch has none (1.13)."""
    ask = getattr(torch._C, "_current_graph_task_id", None)
    return ask() if ask is not None else None


def _nothing():
    pass


def in_backward():
    """Whether a backward pass runs in this thread."""
    if TORCH2:
        return torch._C._current_graph_task_id() != -1
    try:
        torch.autograd.Variable._execution_engine.queue_callback(_nothing)
    except RuntimeError:
        return False
    return True


def uncompiled():
    """A context in which functions that torch.compile has compiled run as they were written."""
    stance = getattr(getattr(torch, "compiler", None), "set_stance", None)  # from 2.6 on
    return contextlib.nullcontext() if stance is None else stance("force_eager")


class _Inputs(tuple):
    """The inputs of a call of ``module``, which that call holds until it has ended."""

    def __del__(self):
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code is torch.nn.Module._call_impl.__code__ and frame.f_locals.get("self") is self.module:
                return  # another hook has replaced them
            frame = frame.f_back
        self.tell()


def when_call_fails(module, tell):
    """Calls ``tell()`` when a call of ``module`` raises an error; in torch 1.13, which has no hook for that, when the
    error has been handled and its traceback is gone. Returns handles of hooks, to be removed."""
    open_calls = []

    def enter(module, inputs):
        open_calls.append(sys.exc_info()[1])
        if TORCH2:
            return None
        held = _Inputs(inputs)
        held.module, depth = module, len(open_calls)
        held.tell = lambda: tell() if len(open_calls) >= depth else None
        return held

    def leave(module, inputs, output):
        if open_calls.pop() is not sys.exc_info()[1] and TORCH2:
            tell()

    always = {"always_call": True} if TORCH2 else {}
    return module.register_forward_pre_hook(enter), module.register_forward_hook(leave, **always)


def dispatch_modes():
    """The modes (``TorchDispatchMode``) that are on in this thread, the outermost first."""
    return [torch._C._get_dispatch_stack_at(index) for index in range(torch._C._len_torch_dispatch_stack())]


def recomputation_hooks():
    """torch's class of hooks that keep what a checkpoint without re-entrance saves when it runs again. None in torch
    1.13, which has none: it keeps all tensors detached and compares nothing."""
    return getattr(torch.utils.checkpoint, "_recomputation_hook", None)


def _autocast_of(device_type):
    if device_type == "meta":
        return False, torch.float32  # there is none
    if TORCH2:
        return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    if device_type == "cpu":
        return torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype()
    return torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()


def autocast_now(device_types):
    """A function that makes a context with the autocast settings of this moment, for the given device types."""
    states = [(kind, *_autocast_of(kind)) for kind in sorted(set(device_types))]

    @contextlib.contextmanager
    def again():
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in states:
                # Entered as it is when nothing changes: torch warns about dtypes that a device lacks.
                if enabled or _autocast_of(kind)[0]:
                    stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False))
            yield

    return again


def autocast_is_on(device_type):
    return _autocast_of(device_type)[0]


def autocast_dtype(device_type):
    """The dtype in which products run by autocast at this moment; None where it is off."""
    enabled, dtype = _autocast_of(device_type)
    return dtype if enabled else None


def without_autocast(device_type):
    """A context without it. torch 1.13 makes none for the device meta."""
    return torch.autocast(device_type, enabled=False) if autocast_is_on(device_type) else contextlib.nullcontext()


def is_compiling():
    """Whether torch.compile is tracing the caller; torch 1.13 has none."""
    ask = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    return ask is not None and ask()


def transforms_are_active():
    """Whether the caller runs in a transform of torch.func, such as vmap; torch 1.13 has none."""
    ask = getattr(torch._C, "_are_functorch_transforms_active", None)
    return ask is not None and ask()


def autocast_decorators(device_type):
    """torch's ``(custom_fwd, custom_bwd)`` for autograd functions on a device type."""
    if hasattr(torch, "amp") and hasattr(torch.amp, "custom_fwd"):
        return (
            functools.partial(torch.amp.custom_fwd, device_type=device_type),
            functools.partial(torch.amp.custom_bwd, device_type=device_type),
        )
    return cuda_amp.custom_fwd, cuda_amp.custom_bwd


def takes_context_setup(cls):
    """Makes an autograd function with ``forward(*inputs)`` and ``setup_context`` work in torch 1.13 as well, where
    ``forward`` gets the context and sets it up."""
    if TORCH2:
        return cls
    compute, setup_context = cls.forward, cls.setup_context

    @functools.wraps(compute)
    def forward(ctx, *inputs):
        output = compute(*inputs)
        setup_context(ctx, inputs, output)
        return output

    cls.forward = staticmethod(forward)
    return cls


@contextlib.contextmanager
def no_autocast_cache():
    """A context in which autocast casts afresh: what it cached under ``no_grad`` has no graph, and a later use with
    gradients would silently get that copy."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def forward_hooks_take_kwargs():
    """Whether hooks on modules can see keyword arguments (2.x)."""
    return "with_kwargs" in inspect.signature(torch.nn.Module.register_forward_hook).parameters


def storage_of(tensor):
    """The memory behind a tensor, untyped: ``resize_(bytes)``, ``nbytes()``, ``data_ptr()``."""
    return tensor.untyped_storage() if TORCH2 else tensor.storage().untyped()


def memory_of(tensor):
    """The identity of a tensor's memory. Meta tensors have no address."""
    return storage_of(tensor)._cdata


def untyped_storage(typed):
    """The bytes under a ``TypedStorage``, as a storage of their own."""
    return typed._untyped_storage if hasattr(typed, "_untyped_storage") else typed._storage


def as_subclass(tensor, cls):
    """``tensor.as_subclass(cls)``, also under a dispatch mode, where torch 1.13 refuses it."""
    guard = torch._C._DisableTorchDispatch()  # until it is deleted
    made = tensor.as_subclass(cls)
    del guard
    return made


def group_around(backend, name, store, rank, size):
    """A process group with this backend, called ``name``, that torch.distributed's tables do not know. On torch 1.13 a
    backend is one."""
    if not TORCH2:
        return backend
    try:
        group = dist.ProcessGroup(store, rank, size)
    except TypeError:  # before 2.6
        group = dist.ProcessGroup(store, rank, size, dist.ProcessGroup.Options(name))
    kind = dist.Backend.backend_type_map[name]
    group._set_default_backend(kind)
    for device in dist.Backend.backend_capability[name]:
        group._register_backend(torch.device(device), kind, backend)
    return group
