"""Accelerators whose verbs are the functions of a module that has those of ``torch.cuda``."""

import importlib

import torch
import torch.distributed

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator, constant
from deepspeed.accelerator.native_pinning import get_active_native_pinned_memory
from deepspeed.host.vendors import VENDORS


def module_of(vendor):
    """The module with the verbs of a row of ``VENDORS``. ValueError that names the package, or the module, that is not
    there."""
    missing, found = vendor.missing(), None
    if not missing:
        importlib.import_module(vendor.package)
        name = vendor.verbs.removeprefix("torch.")
        found = importlib.import_module(vendor.verbs) if name == vendor.verbs else getattr(torch, name, None)
    if found is None:
        why = f"{missing}: install it" if missing else f"the package {vendor.package} here has no {vendor.verbs}"
        raise ValueError(f"the accelerator {vendor.name!r} cannot work here, because {why}, or unset DS_ACCELERATOR")
    return found


def probe(name):
    """Whether this process sees a device of a row of ``VENDORS``; a text that says why not. The package is looked for
    before it is imported."""
    vendor = VENDORS[name]
    if missing := vendor.missing():
        return missing
    try:
        module = module_of(vendor)
    except ValueError:
        return f"{vendor.package} brings no {vendor.verbs}"
    others = getattr(torch.backends, name, None)  # of mps
    available = getattr(module, "is_available", None) or getattr(others, "is_available", None)
    return (available is not None and available()) or f"{vendor.verbs} sees no device"


def _of_device(name):
    return lambda self, device_index=None: getattr(self.module, name)(device_index)


def _call(name):
    return lambda self: getattr(self.module, name)()


def _seed(name):
    return lambda self, seed: getattr(self.module, name)(seed)


def _class(name):
    return property(lambda self: getattr(self.module, name, None))


class TorchModuleAccelerator(DeepSpeedAccelerator):
    """The verbs of a device by the functions of its module. ``_vendor``: its row; None: that of ``_name`` in
    ``VENDORS``. ValueError without its package."""

    _vendor = None

    def __init__(self):
        self._vendor = self._vendor or VENDORS[self._name]
        self.module = module_of(self._vendor)
        self._communication_backend_name = self._backend()

    def _backend(self):
        known = [name for name, module in self._vendor.backends if not module]
        ready = [name for name in known if name == "nccl" or getattr(torch.distributed, f"is_{name}_available", bool)()]
        needs = [name for name, module in self._vendor.backends if module]
        return next(iter([*ready, *needs, *known]), None)

    # ---- kind of device ------------------------------------------------------------------------------------------
    is_synchronized_device = constant(False)
    use_host_timers = constant(False)
    resolves_data_dependency = constant(False)
    handles_memory_backpressure = constant(False)

    # ---- devices -------------------------------------------------------------------------------------------------
    device = _of_device("device")
    synchronize = _of_device("synchronize")
    current_device = _call("current_device")
    device_count = _call("device_count")

    def device_name(self, device_index=None):
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def set_device(self, device_index):
        self.module.set_device(device_index)

    def current_device_name(self):
        return f"{self._name}:{self.current_device()}"

    def is_available(self):
        return probe(self._name) is True

    # ---- random numbers ------------------------------------------------------------------------------------------
    def set_rng_state(self, new_state, device_index=None):
        if device_index is None:
            return self.module.set_rng_state(new_state)
        return self.module.set_rng_state(new_state, device_index)

    def get_rng_state(self, device_index=None):
        return self.module.get_rng_state() if device_index is None else self.module.get_rng_state(device_index)

    manual_seed = _seed("manual_seed")
    manual_seed_all = _seed("manual_seed_all")
    initial_seed = _call("initial_seed")

    def default_generator(self, device_index):
        return self.module.default_generators[device_index]

    # ---- streams and events --------------------------------------------------------------------------------------
    Stream = _class("Stream")
    Event = _class("Event")
    current_stream = _of_device("current_stream")

    def default_stream(self, device_index=None):
        """The device's default stream; the current one where the module does not tell them apart."""
        return getattr(self.module, "default_stream", self.module.current_stream)(device_index)

    def stream(self, stream):
        return self.module.stream(stream)

    # ---- memory --------------------------------------------------------------------------------------------------
    empty_cache = _call("empty_cache")
    memory_allocated = _of_device("memory_allocated")
    max_memory_allocated = _of_device("max_memory_allocated")
    memory_stats = _of_device("memory_stats")
    reset_peak_memory_stats = _of_device("reset_peak_memory_stats")
    memory_reserved = _of_device("memory_reserved")
    max_memory_reserved = _of_device("max_memory_reserved")

    def total_memory(self, device_index=None):
        index = self.current_device() if device_index is None else device_index
        return self.module.get_device_properties(index).total_memory

    def available_memory(self, device_index=None):
        """Bytes that the driver has free, plus those that torch's allocator holds without using them; without an answer
        of the driver the total minus what is in use."""
        if not hasattr(self.module, "mem_get_info"):
            return self.total_memory(device_index) - self.memory_allocated(device_index)
        free = self.module.mem_get_info(device_index)[0]
        return free + self.memory_reserved(device_index) - self.memory_allocated(device_index)

    # ---- dtypes --------------------------------------------------------------------------------------------------
    def is_bf16_supported(self):
        return bool(getattr(self.module, "is_bf16_supported", lambda: True)())

    is_fp16_supported = constant(True)

    def supported_dtypes(self):
        kinds = ((torch.float16, self.is_fp16_supported()), (torch.bfloat16, self.is_bf16_supported()))
        return [torch.float32, *(dtype for dtype, supported in kinds if supported)]

    # ---- profiling and start-up ----------------------------------------------------------------------------------
    def lazy_call(self, callback):
        """Calls ``callback`` once the device is initialised; now, where the module does not wait."""
        return getattr(self.module, "_lazy_call", lambda call: call())(callback)

    is_triton_supported = constant(False)

    # ---- graphs --------------------------------------------------------------------------------------------------
    def create_graph(self):
        made = getattr(self.module, f"{self._name.upper()}Graph", None)
        return None if made is None else made()

    def capture_to_graph(self, graph, pool=None, stream=None):
        if graph is None:
            return super().capture_to_graph(graph, pool, stream)
        return self.module.graph(graph, pool, stream)

    def replay_graph(self, graph):
        if graph is not None:
            graph.replay()

    def is_current_stream_capturing(self):
        return bool(getattr(self.module, "is_current_stream_capturing", lambda: False)())

    # ---- tensors -------------------------------------------------------------------------------------------------
    def pin_memory(self, tensor, make_copy=True, match_shape=True):
        native = get_active_native_pinned_memory()
        if native is not None:
            return native.pin(tensor, make_copy, match_shape)
        pinned = tensor.pin_memory() if make_copy else torch.empty_like(tensor, device="cpu", pin_memory=True)
        return pinned if match_shape else pinned.reshape(-1)

    # ---- native ops ----------------------------------------------------------------------------------------------
    op_builder_dir = constant("deepspeed.ops.op_builder")

    # ---- environment ---------------------------------------------------------------------------------------------
    def export_envs(self):
        return list(self._vendor.prefixes)

    def visible_devices_envs(self):
        return [self._vendor.visible] if self._vendor.visible else []

    def set_visible_devices_envs(self, current_env, local_accelerator_ids):
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))
