"""The CPU as accelerator: one device per rank, synchronous, with main memory as its memory."""

import contextlib
import os
from functools import lru_cache

import torch

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator, constant, of_device
from deepspeed.accelerator.native_pinning import get_active_native_pinned_memory
from deepspeed.host.cpu import memory_bytes, resident_bytes, return_free_memory
from deepspeed.host.numa import numa_node_count
from deepspeed.host.packages import is_installed


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
    is_synchronized_device = constant(True)
    use_host_timers = constant(True)
    resolves_data_dependency = constant(True)
    handles_memory_backpressure = constant(True)

    # ---- devices -------------------------------------------------------------------------------------------------
    device_name = of_device(lambda index: "cpu")
    device = of_device(lambda index: contextlib.nullcontext())
    synchronize = of_device(lambda index: None)
    current_device_name = constant("cpu")
    is_available = constant(True)

    def set_device(self, device_index):
        pass  # a rank's cores are bound by the launcher, before the process starts

    def current_device(self):
        return int(os.environ.get("LOCAL_RANK", 0))

    def device_count(self):
        """Ranks on this node if a launcher started us, else the memory nodes."""
        size = int(os.environ.get("LOCAL_SIZE", 0))
        return size if size > 0 else numa_node_count()

    # ---- random numbers ------------------------------------------------------------------------------------------
    def set_rng_state(self, new_state, device_index=None):
        torch.set_rng_state(new_state)

    get_rng_state = of_device(lambda index: torch.get_rng_state())

    def manual_seed(self, seed):
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self):
        return torch.initial_seed()

    def default_generator(self, device_index):
        return torch.default_generator

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

    def memory_stats(self, device_index=None):
        return {"allocated_bytes.all.current": self.get_rss(), "allocated_bytes.all.peak": self._max_resident}

    def reset_peak_memory_stats(self, device_index=None):
        self.reset_rss()

    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated
    total_memory = of_device(lambda index: memory_bytes()[0])
    available_memory = of_device(lambda index: memory_bytes()[1])

    # ---- dtypes --------------------------------------------------------------------------------------------------
    is_bf16_supported = constant(True)

    def is_fp16_supported(self):
        return _half_runs()

    def supported_dtypes(self):
        return [torch.float32, torch.bfloat16] + ([torch.float16] if _half_runs() else [])

    # ---- names of the pieces that fit ----------------------------------------------------------------------------
    def communication_backend_name(self):
        """``"ccl"`` where Intel's oneCCL bindings are installed, else ``"gloo"``."""
        if self._communication_backend_name is None:
            has_ccl = is_installed("oneccl_bindings_for_pytorch")
            self._communication_backend_name = "ccl" if has_ccl else "gloo"
        return self._communication_backend_name

    is_triton_supported = constant(False)

    op_builder_dir = constant("deepspeed.ops.op_builder.cpu")

    def lazy_call(self, callback):
        return callback()

    def pin_memory(self, tensor, make_copy=True, match_shape=True):
        native = get_active_native_pinned_memory()
        if native is not None:
            return native.pin(tensor, make_copy, match_shape)
        return tensor if match_shape else tensor.reshape(-1)
