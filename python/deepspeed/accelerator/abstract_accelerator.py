"""What every accelerator offers. A new one is a file ``<name>_accelerator.py`` with one class ``<NAME>_Accelerator``.

The verbs mean what they mean in ``torch.cuda``; a device without a notion of streams, events, graphs or a memory
pool answers with None, a context that does nothing, or zero. ``device_index`` None always means the current device.
Memory figures are bytes.
"""

import importlib
import importlib.util
import inspect
import operator
from abc import ABC, abstractmethod

import torch


def _nothing(self):
    pass


def _of_device(self, device_index=None):
    pass


def _verb(doc, signature=_nothing):
    """An abstract method. It is called as ``signature``."""

    def verb(self, *args, **kwargs):
        raise NotImplementedError(doc)

    verb.__doc__, verb.__signature__ = doc, inspect.signature(signature)
    return abstractmethod(verb)


def _class_of(doc):
    """An abstract property."""
    return property(_verb(doc), doc=doc)


def says(value):
    """A verb of an accelerator that answers with ``value``, whatever it is asked about."""

    def verb(self, *args, **kwargs):
        return value

    verb.of_the_interface = True
    return verb


def calls(path):
    """A verb of one argument at most: the function at ``path``, "torch.cuda.memory_stats", which is looked up at each
    call."""
    function = operator.attrgetter(path[len("torch.") :])

    def verb(self, *args, **kwargs):
        return function(torch)(*args, *kwargs.values())

    verb.of_the_interface = True
    return verb


def class_at(path):
    """A property: the class at ``path``."""
    found = operator.attrgetter(path[len("torch.") :])
    return property(lambda self: found(torch))


class DeepSpeedAccelerator(ABC):  # noqa: B024 (its abstract methods are made by _verb)
    """``_name`` is torch's device type; ``_communication_backend_name`` torch.distributed's backend for it."""

    _name = None
    _communication_backend_name = None
    _compile_backend = "inductor"

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        for name, verb in vars(cls).items():
            if getattr(verb, "of_the_interface", False):  # it looks like the method that it implements
                meant = getattr(DeepSpeedAccelerator, name)
                verb.__name__, verb.__qualname__ = name, f"{cls.__qualname__}.{name}"
                verb.__doc__, verb.__signature__ = meant.__doc__, inspect.signature(meant)

    # True where range_push takes a domain and a category of its own.
    supports_nvtx_domain = False

    # ---- kind of device ------------------------------------------------------------------------------------------
    is_synchronized_device = _verb("True when an operation has finished once its Python call returns.")
    use_host_timers = _verb("True when wall-clock timers measure the device, False when events are needed.")
    resolves_data_dependency = _verb(
        "True when the device orders operations on the same data by itself, so that streams need no waits.",
    )
    handles_memory_backpressure = _verb("True when launching work ahead of the device cannot exhaust its memory.")

    # ---- devices -------------------------------------------------------------------------------------------------
    device_name = _verb('``"cuda"`` without an index, ``"cuda:0"`` with one.', _of_device)
    device = _verb("A context in which the given device is the current one.", _of_device)
    set_device = _verb("Makes the given device the current one of this thread.", lambda self, device_index: None)
    current_device = _verb("Index of the current device.")
    current_device_name = _verb("Name of the current device with its index, fit for ``tensor.to``.")
    device_count = _verb("How many devices this machine offers to one job.")
    synchronize = _verb("Waits until all work of the device has finished.", _of_device)
    is_available = _verb("True when the device can be used here; never creates a context on it.")

    # ---- random numbers ------------------------------------------------------------------------------------------
    random = _verb("The module ``torch.random``.")
    set_rng_state = _verb("Restores what ``get_rng_state`` returned.", lambda self, new_state, device_index=None: None)
    get_rng_state = _verb("State of the device's generator, a uint8 tensor in main memory.", _of_device)
    manual_seed = _verb("Seeds the generator of the current device.", lambda self, seed: None)
    manual_seed_all = _verb("Seeds the generators of all devices.", lambda self, seed: None)
    initial_seed = _verb("The seed of the current device's generator.")
    default_generator = _verb("The device's ``torch.Generator``.", lambda self, device_index: None)

    # ---- streams and events --------------------------------------------------------------------------------------
    Stream = _class_of("The stream class, or None.")
    stream = _verb("A context in which work goes to ``stream``.", lambda self, stream: None)
    current_stream = _verb("The stream that work goes to now, or None.", _of_device)
    default_stream = _verb("The device's default stream, or None.", _of_device)
    Event = _class_of("The event class, or None.")

    # ---- memory --------------------------------------------------------------------------------------------------
    empty_cache = _verb("Gives memory that no tensor uses back to the device.")
    memory_allocated = _verb("Bytes in use.", _of_device)
    max_memory_allocated = _verb("Peak of ``memory_allocated`` since the last reset.", _of_device)
    reset_max_memory_allocated = _verb("Starts a new peak.", _of_device)
    memory_cached = _verb("The older name of ``memory_reserved``.", _of_device)
    max_memory_cached = _verb("The older name of ``max_memory_reserved``.", _of_device)
    reset_max_memory_cached = _verb("Starts a new peak of the reserved bytes.", _of_device)
    memory_stats = _verb(
        "A dict of figures, with at least ``allocated_bytes.all.current`` and ``allocated_bytes.all.peak``.",
        _of_device,
    )
    reset_peak_memory_stats = _verb("Starts new peaks of all figures.", _of_device)
    memory_reserved = _verb("Bytes held by the allocator, in use or not.", _of_device)
    max_memory_reserved = _verb("Peak of ``memory_reserved``.", _of_device)
    total_memory = _verb("Bytes that the device has.", _of_device)
    available_memory = _verb("Bytes that could still be allocated.", _of_device)

    # ---- dtypes --------------------------------------------------------------------------------------------------
    is_bf16_supported = _verb("True when models can be trained in bfloat16.")
    is_fp16_supported = _verb("True when models can be trained in float16.")
    supported_dtypes = _verb("The floating dtypes that models can be trained in.")

    # ---- profiling and start-up ----------------------------------------------------------------------------------
    range_push = _verb(
        "Opens a named range in the device's profiler.",
        lambda self, msg, domain=None, category=None: None,
    )
    range_pop = _verb("Closes the innermost range.", lambda self, domain=None: None)
    lazy_call = _verb("Calls ``callback`` once the device is initialised, now if it is.", lambda self, callback: None)

    # ---- names of the pieces that fit ----------------------------------------------------------------------------
    communication_backend_name = _verb("torch.distributed's backend for tensors of this device.")
    is_triton_supported = _verb("True when Triton compiles for this device.")

    def prefer_triton_grouped_mm(self):
        """True when a Triton kernel beats torch's own grouped matrix product on this device."""
        return False

    # ---- graphs --------------------------------------------------------------------------------------------------
    create_graph = _verb("A new graph object, or None.")
    capture_to_graph = _verb(
        "A context in which work is recorded into ``graph``.",
        lambda self, graph, pool=None, stream=None: None,
    )
    replay_graph = _verb("Runs a recorded graph.", lambda self, graph: None)

    # ---- tensors -------------------------------------------------------------------------------------------------
    BFloat16Tensor = _class_of("The tensor class, as ``torch.cuda.BFloat16Tensor``.")
    ByteTensor = _class_of("The tensor class of uint8.")
    DoubleTensor = _class_of("The tensor class of float64.")
    FloatTensor = _class_of("The tensor class of float32.")
    HalfTensor = _class_of("The tensor class of float16.")
    IntTensor = _class_of("The tensor class of int32.")
    LongTensor = _class_of("The tensor class of int64.")
    pin_memory = _verb(
        "A tensor in page-locked main memory from which the device can copy without help. ``make_copy`` False "
        "leaves its content undefined; ``match_shape`` False makes it one-dimensional. A device that shares main "
        "memory returns ``tensor``.",
        lambda self, tensor, make_copy=True, match_shape=True: None,
    )
    is_pinned = _verb("True when ``tensor`` lies in page-locked memory.", lambda self, tensor: None)
    unpin_memory = _verb(
        "Ends the pinning of a tensor that ``pin_memory`` made; the tensor must not be used by copies any more.",
        lambda self, tensor: None,
    )
    on_accelerator = _verb("True when ``tensor`` lives on this kind of device.", lambda self, tensor: None)

    # ---- native ops ----------------------------------------------------------------------------------------------
    op_builder_dir = _verb("Module path of the op builders for this device.")

    def create_op_builder(self, class_name):
        """An instance of the builder named ``class_name``, or None where there is none."""
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def get_op_builder(self, class_name):
        """The builder class named ``class_name``, or None where there is none: only that feature is missing then."""
        # By name at run time: builders belong to the ops, which stand above the accelerators.
        name = self.op_builder_dir()
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        return None if found is None else getattr(importlib.import_module(name), class_name, None)

    def build_extension(self):
        """The setuptools command class that builds extensions for this device."""
        # At call: it pulls in setuptools and costs a quarter of a second that no training run needs.
        return importlib.import_module("torch.utils.cpp_extension").BuildExtension

    # ---- environment ---------------------------------------------------------------------------------------------
    export_envs = _verb("Prefixes of environment variables that must reach every node.")
    visible_devices_envs = _verb("Names of the variables that choose among devices.")
    set_visible_devices_envs = _verb(
        "Writes the choice of devices into the dict ``current_env``.",
        lambda self, current_env, local_accelerator_ids: None,
    )

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
        # find_spec of the parent runs nothing heavy; torch._dynamo itself takes a second to import.
        if importlib.util.find_spec("torch._dynamo") is None:
            return []
        return importlib.import_module("torch._dynamo").list_backends(exclude_tags=())
