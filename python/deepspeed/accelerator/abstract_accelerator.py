"""The interface of every accelerator. A new one is a file ``<name>_accelerator.py`` with one class
``<NAME>_Accelerator``.

The verbs mean what they mean in ``torch.cuda``. What every device must say is abstract; a device without streams,
events, graphs, profiler ranges or variables of its own keeps the answers below: None, a context that does nothing, an
empty list. ``device_index`` None always means the current device. Memory figures are bytes.
"""

# ruff: noqa: B027  (an empty body answers for devices that have no such thing)

import contextlib
import importlib
import mmap
from abc import ABC, abstractmethod

import torch

from deepspeed.accelerator.native_pinning import get_active_native_pinned_memory
from deepspeed.host.packages import is_installed


def constant(value):
    """A verb without arguments that always answers ``value``."""
    return lambda self: value


def of_device(function):
    """A verb of one device, None being the current one, that is a function of its index."""
    return lambda self, device_index=None: function(device_index)


def _tensor_class(name, dtype):
    find = lambda self: getattr(getattr(torch, self._name, torch), name, None) or getattr(torch, name)  # noqa: E731
    return property(find, doc=f"The tensor class of {dtype}, as ``torch.cuda.{name}``.")


class DeepSpeedAccelerator(ABC):
    """``_name`` is torch's device type; ``_communication_backend_name`` torch.distributed's backend for it;
    ``_nccl_library`` the path of a library with NCCL's interface that moves memory of the device, where it is not
    NVIDIA's: engines call it directly, whatever that backend is."""

    _name = None
    _communication_backend_name = None
    _nccl_library = None
    _compile_backend = "inductor"

    # True where range_push takes a domain and a category of its own.
    supports_nvtx_domain = False

    # ---- kind of device ------------------------------------------------------------------------------------------
    @abstractmethod
    def is_synchronized_device(self):
        """True when an operation has finished once its Python call returns."""

    @abstractmethod
    def use_host_timers(self):
        """True when wall-clock timers measure the device, False when events are needed."""

    @abstractmethod
    def resolves_data_dependency(self):
        """True when the device orders operations on the same data by itself, so that streams need no waits."""

    @abstractmethod
    def handles_memory_backpressure(self):
        """True when launching work ahead of the device cannot exhaust its memory."""

    def _on_host(self, device):
        """Whether tensors of ``device`` are in host memory. Those of ``meta`` count as tensors of this device."""
        return (self._name if device.type == "meta" else device.type) == "cpu"

    # ---- devices -------------------------------------------------------------------------------------------------
    @abstractmethod
    def device_name(self, device_index=None):
        """``"cuda"`` without an index, ``"cuda:0"`` with one."""

    @abstractmethod
    def device(self, device_index=None):
        """A context in which the given device is the current one."""

    @abstractmethod
    def set_device(self, device_index):
        """Makes the given device the current one of this thread."""

    @abstractmethod
    def current_device(self):
        """Index of the current device."""

    @abstractmethod
    def current_device_name(self):
        """Name of the current device with its index, fit for ``tensor.to``."""

    @abstractmethod
    def device_count(self):
        """The number of devices that this machine offers to one job."""

    @abstractmethod
    def synchronize(self, device_index=None):
        """Waits until all work of the device has finished."""

    @abstractmethod
    def is_available(self):
        """True when the device can be used here; never creates a context on it."""

    # ---- random numbers ------------------------------------------------------------------------------------------
    def random(self):
        """The module ``torch.random``."""
        return torch.random

    @abstractmethod
    def set_rng_state(self, new_state, device_index=None):
        """Restores what ``get_rng_state`` returned."""

    @abstractmethod
    def get_rng_state(self, device_index=None):
        """State of the device's generator, a uint8 tensor in main memory."""

    @abstractmethod
    def manual_seed(self, seed):
        """Seeds the generator of the current device."""

    @abstractmethod
    def manual_seed_all(self, seed):
        """Seeds the generators of all devices."""

    @abstractmethod
    def initial_seed(self):
        """The seed of the current device's generator."""

    @abstractmethod
    def default_generator(self, device_index):
        """The device's ``torch.Generator``."""

    # ---- streams and events --------------------------------------------------------------------------------------
    @property
    def Stream(self):
        """The stream class, or None."""

    def stream(self, stream):
        """A context in which work goes to ``stream``."""
        return contextlib.nullcontext()

    def current_stream(self, device_index=None):
        """The stream that work goes to now, or None."""

    def default_stream(self, device_index=None):
        """The device's default stream, or None."""

    @property
    def Event(self):
        """The event class, or None."""

    # ---- memory --------------------------------------------------------------------------------------------------
    @abstractmethod
    def empty_cache(self):
        """Gives memory that no tensor uses back to the device."""

    @abstractmethod
    def memory_allocated(self, device_index=None):
        """Bytes in use."""

    @abstractmethod
    def max_memory_allocated(self, device_index=None):
        """Peak of ``memory_allocated`` since the last reset."""

    def reset_max_memory_allocated(self, device_index=None):
        """Starts a new peak."""
        return self.reset_peak_memory_stats(device_index)

    def memory_cached(self, device_index=None):
        """The older name of ``memory_reserved``."""
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index=None):
        """The older name of ``max_memory_reserved``."""
        return self.max_memory_reserved(device_index)

    def reset_max_memory_cached(self, device_index=None):
        """Starts a new peak of the reserved bytes."""
        return self.reset_peak_memory_stats(device_index)

    @abstractmethod
    def memory_stats(self, device_index=None):
        """A dict of figures, with at least ``allocated_bytes.all.current`` and ``allocated_bytes.all.peak``."""

    @abstractmethod
    def reset_peak_memory_stats(self, device_index=None):
        """Starts new peaks of all figures."""

    @abstractmethod
    def memory_reserved(self, device_index=None):
        """Bytes held by the allocator, in use or not."""

    @abstractmethod
    def max_memory_reserved(self, device_index=None):
        """Peak of ``memory_reserved``."""

    @abstractmethod
    def total_memory(self, device_index=None):
        """Bytes that the device has."""

    @abstractmethod
    def available_memory(self, device_index=None):
        """Bytes that could still be allocated."""

    # ---- dtypes --------------------------------------------------------------------------------------------------
    @abstractmethod
    def is_bf16_supported(self):
        """True when models can be trained in bfloat16."""

    @abstractmethod
    def is_fp16_supported(self):
        """True when models can be trained in float16."""

    @abstractmethod
    def supported_dtypes(self):
        """The floating dtypes that models can be trained in."""

    # ---- profiling and start-up ----------------------------------------------------------------------------------
    def range_push(self, msg, domain=None, category=None):
        """Opens a named range in the device's profiler."""

    def range_pop(self, domain=None):
        """Closes the innermost range."""

    @abstractmethod
    def lazy_call(self, callback):
        """Calls ``callback`` once the device is initialised, now if it is."""

    # ---- names of the pieces that fit ----------------------------------------------------------------------------
    def communication_backend_name(self):
        """torch.distributed's backend for tensors of this device."""
        return self._communication_backend_name

    @abstractmethod
    def is_triton_supported(self):
        """True when Triton compiles for this device."""

    def prefer_triton_grouped_mm(self):
        """True when a Triton kernel beats torch's own grouped matrix product on this device."""
        return False

    # ---- graphs --------------------------------------------------------------------------------------------------
    def create_graph(self):
        """A new graph object, or None."""

    def capture_to_graph(self, graph, pool=None, stream=None):
        """A context in which work is recorded into ``graph``."""
        return contextlib.nullcontext()

    def replay_graph(self, graph):
        """Runs a recorded graph."""

    def is_current_stream_capturing(self):
        """True while the work of the current stream is recorded into a graph."""
        return False

    # ---- tensors -------------------------------------------------------------------------------------------------
    BFloat16Tensor = _tensor_class("BFloat16Tensor", "bfloat16")
    ByteTensor = _tensor_class("ByteTensor", "uint8")
    DoubleTensor = _tensor_class("DoubleTensor", "float64")
    FloatTensor = _tensor_class("FloatTensor", "float32")
    HalfTensor = _tensor_class("HalfTensor", "float16")
    IntTensor = _tensor_class("IntTensor", "int32")
    LongTensor = _tensor_class("LongTensor", "int64")

    @abstractmethod
    def pin_memory(self, tensor, make_copy=True, match_shape=True):
        """A tensor in page-locked main memory from which the device can copy without help.

        ``make_copy`` False leaves its content undefined; ``match_shape`` False makes it one-dimensional. A device
        that shares main memory returns ``tensor``.
        """

    def is_pinned(self, tensor):
        """True when ``tensor`` lies in page-locked memory."""
        native = get_active_native_pinned_memory()
        return tensor.is_pinned() or (native is not None and native.is_pinned(tensor))

    def unpin_memory(self, tensor):
        """Ends the pinning of a tensor that ``pin_memory`` made; the tensor must not be used by copies any more."""
        native = get_active_native_pinned_memory()
        if native is not None:  # pages that torch has pinned go back with the last view of the tensor
            native.unpin(tensor)

    def pin_memory_alignment(self):
        """Bytes to which addresses of memory for ``register_host_memory`` are aligned: those of a page."""
        return mmap.PAGESIZE

    def register_host_memory(self, tensor):
        """Page-locks the memory of ``tensor`` where it is; True where the device has such memory, else nothing happens
        and the answer is False."""
        return False

    def unregister_host_memory(self, tensor):
        """Ends what ``register_host_memory`` began; the same answer."""
        return False

    def on_accelerator(self, tensor):
        """True when ``tensor`` lives on this kind of device."""
        return tensor.device.type == self._name

    # ---- native ops ----------------------------------------------------------------------------------------------
    @abstractmethod
    def op_builder_dir(self):
        """Module path of the op builders for this device."""

    def create_op_builder(self, class_name):
        """An instance of the builder named ``class_name``, or None where there is none."""
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def get_op_builder(self, class_name):
        """The builder class named ``class_name``, or None where there is none: only that feature is missing then."""
        # By name at run time: builders belong to the ops, which stand above the accelerators.
        name = self.op_builder_dir()
        return getattr(importlib.import_module(name), class_name, None) if is_installed(name) else None

    def build_extension(self):
        """The setuptools command class that builds extensions for this device."""
        # At call: it pulls in setuptools and costs a quarter of a second that no training run needs.
        return importlib.import_module("torch.utils.cpp_extension").BuildExtension

    # ---- environment ---------------------------------------------------------------------------------------------
    def export_envs(self):
        """Prefixes of environment variables that must reach every node."""
        return []

    def visible_devices_envs(self):
        """Names of the variables that choose among devices."""
        return []

    def set_visible_devices_envs(self, current_env, local_accelerator_ids):
        """Writes the choice of devices into the dict ``current_env``."""

    # ---- torch.compile -------------------------------------------------------------------------------------------
    def get_compile_backend(self):
        """Name of the torch.compile backend."""
        return self._compile_backend

    def set_compile_backend(self, backend):
        """Chooses the torch.compile backend; ValueError for one that this torch does not have."""
        supported = self._compile_backends()
        if backend not in supported:
            raise ValueError(
                f"{backend!r} is not a torch.compile backend of this torch for {self._name}; "
                f"there are: {', '.join(supported) or 'none (torch.compile needs torch 2)'}."
            )
        self._compile_backend = backend

    def _compile_backends(self):
        # torch._dynamo takes a second to import.
        if not is_installed("torch._dynamo"):
            return []
        return importlib.import_module("torch._dynamo").list_backends(exclude_tags=())
