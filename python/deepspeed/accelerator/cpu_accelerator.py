"""The CPU as accelerator: one device per rank, synchronous, with main memory as its memory."""

import contextlib
import importlib.util
import os
from functools import lru_cache

import torch

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
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
    def is_synchronized_device(self):
        return True

    def use_host_timers(self):
        return True

    def resolves_data_dependency(self):
        return True

    def handles_memory_backpressure(self):
        return True

    # ---- devices -------------------------------------------------------------------------------------------------
    def device_name(self, device_index=None):
        return "cpu"

    def device(self, device_index=None):
        return contextlib.nullcontext()

    def set_device(self, device_index):
        pass  # a rank's cores are bound by the launcher, before the process starts

    def current_device(self):
        return int(os.environ.get("LOCAL_RANK", 0))

    def current_device_name(self):
        return "cpu"

    def device_count(self):
        """Ranks on this node if a launcher started us, else the memory nodes."""
        size = int(os.environ.get("LOCAL_SIZE", 0))
        return size if size > 0 else numa_node_count()

    def synchronize(self, device_index=None):
        pass

    def is_available(self):
        return True

    # ---- random numbers ------------------------------------------------------------------------------------------
    def random(self):
        return torch.random

    def set_rng_state(self, new_state, device_index=None):
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index=None):
        return torch.get_rng_state()

    def manual_seed(self, seed):
        return torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        return torch.manual_seed(seed)

    def initial_seed(self):
        return torch.initial_seed()

    def default_generator(self, device_index):
        return torch.default_generator

    # ---- streams and events --------------------------------------------------------------------------------------
    @property
    def Stream(self):
        return None

    def stream(self, stream):
        return contextlib.nullcontext()

    def current_stream(self, device_index=None):
        return None

    def default_stream(self, device_index=None):
        return None

    @property
    def Event(self):
        return None

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

    def memory_cached(self, device_index=None):
        return self.get_rss()

    def max_memory_cached(self, device_index=None):
        return self.max_memory_allocated()

    def reset_max_memory_cached(self, device_index=None):
        self.reset_rss()

    def memory_stats(self, device_index=None):
        return {
            "allocated_bytes.all.current": self.get_rss(),
            "allocated_bytes.all.peak": self._max_resident,
        }

    def reset_peak_memory_stats(self, device_index=None):
        self.reset_rss()

    def memory_reserved(self, device_index=None):
        return self.get_rss()

    def max_memory_reserved(self, device_index=None):
        return self.max_memory_allocated()

    def total_memory(self, device_index=None):
        return memory_bytes()[0]

    def available_memory(self, device_index=None):
        return memory_bytes()[1]

    # ---- dtypes --------------------------------------------------------------------------------------------------
    def is_bf16_supported(self):
        return True

    def is_fp16_supported(self):
        return _half_runs()

    def supported_dtypes(self):
        return [torch.float32, torch.bfloat16] + ([torch.float16] if _half_runs() else [])

    # ---- profiling and start-up ----------------------------------------------------------------------------------
    def range_push(self, msg, domain=None, category=None):
        pass

    def range_pop(self, domain=None):
        pass

    def lazy_call(self, callback):
        return callback()

    # ---- names of the pieces that fit ----------------------------------------------------------------------------
    def communication_backend_name(self):
        """``"ccl"`` where Intel's oneCCL bindings are installed, else ``"gloo"``."""
        if self._communication_backend_name is None:
            ccl = importlib.util.find_spec("oneccl_bindings_for_pytorch")
            self._communication_backend_name = "ccl" if ccl else "gloo"
        return self._communication_backend_name

    def is_triton_supported(self):
        return False

    # ---- graphs --------------------------------------------------------------------------------------------------
    def create_graph(self):
        return None

    def capture_to_graph(self, graph, pool=None, stream=None):
        return contextlib.nullcontext()

    def replay_graph(self, graph):
        pass

    # ---- tensors -------------------------------------------------------------------------------------------------
    @property
    def BFloat16Tensor(self):
        return torch.BFloat16Tensor

    @property
    def ByteTensor(self):
        return torch.ByteTensor

    @property
    def DoubleTensor(self):
        return torch.DoubleTensor

    @property
    def FloatTensor(self):
        return torch.FloatTensor

    @property
    def HalfTensor(self):
        return torch.HalfTensor

    @property
    def IntTensor(self):
        return torch.IntTensor

    @property
    def LongTensor(self):
        return torch.LongTensor

    def pin_memory(self, tensor, make_copy=True, match_shape=True):
        return tensor if match_shape else tensor.reshape(-1)

    def is_pinned(self, tensor):
        return tensor.is_pinned()

    def unpin_memory(self, tensor):
        pass  # nothing was pinned

    def on_accelerator(self, tensor):
        return tensor.device.type == "cpu"

    # ---- native ops ----------------------------------------------------------------------------------------------
    def op_builder_dir(self):
        return "deepspeed.ops.op_builder.cpu"

    # ---- environment ---------------------------------------------------------------------------------------------
    def export_envs(self):
        return []

    def visible_devices_envs(self):
        return []

    def set_visible_devices_envs(self, current_env, local_accelerator_ids):
        pass
