"""The CPU as accelerator: one device per rank, synchronous, with main memory as its memory."""

import contextlib
import importlib.util
import os
from functools import lru_cache

import torch

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator, calls, class_at, says
from deepspeed.host.cpu import memory_bytes, resident_bytes, return_free_memory
from deepspeed.host.numa import numa_node_count


@lru_cache(maxsize=1)
def _half_runs():
    # Asked of torch itself: 1.13 has no fp16 matrix product on the CPU, 2.x has, and builds differ.
    try:
        half = torch.ones(2, 2, dtype=torch.half, requires_grad=True)
        torch.nn.functional.layer_norm(half @ half, (2,)).sum().backward()
    except RuntimeError:
        return False
    return True


class CPU_Accelerator(DeepSpeedAccelerator):
    """``memory_allocated`` is the resident memory of this process; its peak is of the moments it was asked for."""

    _name = "cpu"

    def __init__(self):
        self._max_resident = 0
        self._communication_backend_name = None

    # ---- kind of device ------------------------------------------------------------------------------------------
    is_synchronized_device = says(True)
    use_host_timers = says(True)
    resolves_data_dependency = says(True)
    handles_memory_backpressure = says(True)

    # ---- devices -------------------------------------------------------------------------------------------------
    device_name = says("cpu")

    def device(self, device_index=None):
        return contextlib.nullcontext()

    set_device = says(None)  # a rank's cores are bound by the launcher, before the process starts

    def current_device(self):
        return int(os.environ.get("LOCAL_RANK", 0))

    current_device_name = says("cpu")

    def device_count(self):
        """Ranks on this node if a launcher started us, else the memory nodes."""
        size = int(os.environ.get("LOCAL_SIZE", 0))
        return size if size > 0 else numa_node_count()

    synchronize = says(None)
    is_available = says(True)

    # ---- random numbers ------------------------------------------------------------------------------------------
    random = says(torch.random)

    def set_rng_state(self, new_state, device_index=None):
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index=None):
        return torch.get_rng_state()

    manual_seed = calls("torch.manual_seed")
    manual_seed_all = calls("torch.manual_seed")
    initial_seed = calls("torch.initial_seed")

    def default_generator(self, device_index):
        return torch.default_generator

    # ---- streams and events --------------------------------------------------------------------------------------
    Stream = property(says(None))

    def stream(self, stream):
        return contextlib.nullcontext()

    current_stream = says(None)
    default_stream = says(None)
    Event = property(says(None))

    # ---- memory --------------------------------------------------------------------------------------------------
    def get_rss(self):
        """Resident bytes of this process; also updates the peak."""
        resident = resident_bytes()
        self._max_resident = max(self._max_resident, resident)
        return resident

    def reset_rss(self):
        """Starts a new peak at what is resident now, and returns that."""
        self._max_resident = 0
        return self.get_rss()

    def empty_cache(self):
        """Gives memory that was freed, but is kept by malloc, back to the system."""
        return_free_memory()

    def memory_allocated(self, device_index=None):
        return self.get_rss()

    def max_memory_allocated(self, device_index=None):
        self.get_rss()
        return self._max_resident

    def reset_max_memory_allocated(self, device_index=None):
        self.reset_rss()

    def memory_stats(self, device_index=None):
        return {
            "allocated_bytes.all.current": self.get_rss(),
            "allocated_bytes.all.peak": self._max_resident,
        }

    memory_cached = memory_reserved = memory_allocated
    max_memory_cached = max_memory_reserved = max_memory_allocated
    reset_max_memory_cached = reset_peak_memory_stats = reset_max_memory_allocated

    def total_memory(self, device_index=None):
        return memory_bytes()[0]

    def available_memory(self, device_index=None):
        return memory_bytes()[1]

    # ---- dtypes --------------------------------------------------------------------------------------------------
    is_bf16_supported = says(True)

    def is_fp16_supported(self):
        return _half_runs()

    def supported_dtypes(self):
        return [torch.float32, torch.bfloat16] + ([torch.float16] if _half_runs() else [])

    # ---- profiling and start-up ----------------------------------------------------------------------------------
    range_push = says(None)
    range_pop = says(None)

    def lazy_call(self, callback):
        return callback()

    # ---- names of the pieces that fit ----------------------------------------------------------------------------
    def communication_backend_name(self):
        """``"ccl"`` where Intel's oneCCL bindings are installed, else ``"gloo"``."""
        if self._communication_backend_name is None:
            ccl = importlib.util.find_spec("oneccl_bindings_for_pytorch")
            self._communication_backend_name = "ccl" if ccl else "gloo"
        return self._communication_backend_name

    is_triton_supported = says(False)

    # ---- graphs --------------------------------------------------------------------------------------------------
    create_graph = says(None)

    def capture_to_graph(self, graph, pool=None, stream=None):
        return contextlib.nullcontext()

    replay_graph = says(None)

    # ---- tensors -------------------------------------------------------------------------------------------------
    BFloat16Tensor = class_at("torch.BFloat16Tensor")
    ByteTensor = class_at("torch.ByteTensor")
    DoubleTensor = class_at("torch.DoubleTensor")
    FloatTensor = class_at("torch.FloatTensor")
    HalfTensor = class_at("torch.HalfTensor")
    IntTensor = class_at("torch.IntTensor")
    LongTensor = class_at("torch.LongTensor")

    def pin_memory(self, tensor, make_copy=True, match_shape=True):
        return tensor if match_shape else tensor.reshape(-1)

    def is_pinned(self, tensor):
        return tensor.is_pinned()

    unpin_memory = says(None)  # nothing was pinned

    def on_accelerator(self, tensor):
        return tensor.device.type == "cpu"

    # ---- native ops ----------------------------------------------------------------------------------------------
    op_builder_dir = says("deepspeed.ops.op_builder.cpu")

    # ---- environment ---------------------------------------------------------------------------------------------
    def export_envs(self):
        return []

    def visible_devices_envs(self):
        return []

    set_visible_devices_envs = says(None)
