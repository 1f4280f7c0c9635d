"""NVIDIA GPUs through ``torch.cuda``. Importable without a driver; touches the driver on first use only."""

import importlib
import importlib.util
import os

import torch

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.host.devices import nvidia_device_count


def probe():
    """Whether this process sees a GPU and its torch can use it; a text that says why not. Creates no context."""
    if not torch.backends.cuda.is_built():
        return "this torch is built without CUDA"
    if torch.version.cuda and nvidia_device_count() == 0:
        return "no NVIDIA GPU on this machine"
    # Through NVML, where torch can: the runtime's own count would make CUDA unusable in forked children.
    return torch.cuda.device_count() > 0 or "torch sees no usable GPU (CUDA_VISIBLE_DEVICES, driver version)"


class CUDA_Accelerator(DeepSpeedAccelerator):
    """``torch.cuda`` word for word."""

    _name = "cuda"
    _communication_backend_name = "nccl"

    def __init__(self):
        self._nvtx = importlib.import_module("nvtx") if importlib.util.find_spec("nvtx") else None
        self.supports_nvtx_domain = self._nvtx is not None
        self._seen = False  # a GPU was found; asked in hot paths, and a GPU does not go away

    # ---- kind of device ------------------------------------------------------------------------------------------
    def is_synchronized_device(self):
        return False

    def use_host_timers(self):
        return False

    def resolves_data_dependency(self):
        return False

    def handles_memory_backpressure(self):
        return False

    # ---- devices -------------------------------------------------------------------------------------------------
    def device_name(self, device_index=None):
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index=None):
        return torch.cuda.device(device_index)

    def set_device(self, device_index):
        torch.cuda.set_device(device_index)

    def current_device(self):
        return torch.cuda.current_device()

    def current_device_name(self):
        return f"cuda:{torch.cuda.current_device()}"

    def device_count(self):
        return torch.cuda.device_count()

    def synchronize(self, device_index=None):
        return torch.cuda.synchronize(device_index)

    def is_available(self):
        self._seen = self._seen or probe() is True
        return self._seen

    # ---- random numbers ------------------------------------------------------------------------------------------
    def random(self):
        return torch.random

    def set_rng_state(self, new_state, device_index=None):
        if device_index is None:
            return torch.cuda.set_rng_state(new_state)
        return torch.cuda.set_rng_state(new_state, device_index)

    def get_rng_state(self, device_index=None):
        return torch.cuda.get_rng_state() if device_index is None else torch.cuda.get_rng_state(device_index)

    def manual_seed(self, seed):
        return torch.cuda.manual_seed(seed)

    def manual_seed_all(self, seed):
        return torch.cuda.manual_seed_all(seed)

    def initial_seed(self):
        return torch.cuda.initial_seed()

    def default_generator(self, device_index):
        torch.cuda.init()  # fills the tuple below
        return torch.cuda.default_generators[device_index]

    # ---- streams and events --------------------------------------------------------------------------------------
    @property
    def Stream(self):
        return torch.cuda.Stream

    def stream(self, stream):
        return torch.cuda.stream(stream)

    def current_stream(self, device_index=None):
        return torch.cuda.current_stream(device_index)

    def default_stream(self, device_index=None):
        return torch.cuda.default_stream(device_index)

    @property
    def Event(self):
        return torch.cuda.Event

    # ---- memory --------------------------------------------------------------------------------------------------
    def empty_cache(self):
        return torch.cuda.empty_cache()

    def memory_allocated(self, device_index=None):
        return torch.cuda.memory_allocated(device_index)

    def max_memory_allocated(self, device_index=None):
        return torch.cuda.max_memory_allocated(device_index)

    def reset_max_memory_allocated(self, device_index=None):
        return torch.cuda.reset_peak_memory_stats(device_index)

    def memory_cached(self, device_index=None):
        return torch.cuda.memory_reserved(device_index)

    def max_memory_cached(self, device_index=None):
        return torch.cuda.max_memory_reserved(device_index)

    def reset_max_memory_cached(self, device_index=None):
        return torch.cuda.reset_peak_memory_stats(device_index)

    def memory_stats(self, device_index=None):
        return torch.cuda.memory_stats(device_index)

    def reset_peak_memory_stats(self, device_index=None):
        return torch.cuda.reset_peak_memory_stats(device_index)

    def memory_reserved(self, device_index=None):
        return torch.cuda.memory_reserved(device_index)

    def max_memory_reserved(self, device_index=None):
        return torch.cuda.max_memory_reserved(device_index)

    def total_memory(self, device_index=None):
        index = torch.cuda.current_device() if device_index is None else device_index
        return torch.cuda.get_device_properties(index).total_memory

    def available_memory(self, device_index=None):
        """What the driver has free plus what torch's allocator holds without using it."""
        free = torch.cuda.mem_get_info(device_index)[0]
        return free + torch.cuda.memory_reserved(device_index) - torch.cuda.memory_allocated(device_index)

    # ---- dtypes --------------------------------------------------------------------------------------------------
    def is_bf16_supported(self):
        return self.is_available() and torch.cuda.is_bf16_supported()

    def is_fp16_supported(self):
        # From compute capability 7.0 on (tensor cores); Pascal's fp16 arithmetic is a slow subset of it.
        if torch.version.hip:
            return True
        return self.is_available() and torch.cuda.get_device_properties(torch.cuda.current_device()).major >= 7

    def supported_dtypes(self):
        dtypes = [torch.float32]
        if self.is_fp16_supported():
            dtypes.append(torch.float16)
        if self.is_bf16_supported():
            dtypes.append(torch.bfloat16)
        return dtypes

    # ---- profiling and start-up ----------------------------------------------------------------------------------
    def range_push(self, msg, domain=None, category=None):
        if domain is not None and self._nvtx is not None:
            return self._nvtx.push_range(msg, domain=domain, category=category)
        return torch.cuda.nvtx.range_push(msg) if self.is_available() else None

    def range_pop(self, domain=None):
        if domain is not None and self._nvtx is not None:
            return self._nvtx.pop_range(domain=domain)
        return torch.cuda.nvtx.range_pop() if self.is_available() else None

    def lazy_call(self, callback):
        return torch.cuda._lazy_call(callback)

    # ---- names of the pieces that fit ----------------------------------------------------------------------------
    def communication_backend_name(self):
        return self._communication_backend_name

    def is_triton_supported(self):
        if torch.version.hip or not self.is_available():
            return False
        return torch.cuda.get_device_properties(torch.cuda.current_device()).major >= 8

    # ---- graphs --------------------------------------------------------------------------------------------------
    def create_graph(self):
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph, pool=None, stream=None):
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph):
        graph.replay()

    # ---- tensors -------------------------------------------------------------------------------------------------
    @property
    def BFloat16Tensor(self):
        return torch.cuda.BFloat16Tensor

    @property
    def ByteTensor(self):
        return torch.cuda.ByteTensor

    @property
    def DoubleTensor(self):
        return torch.cuda.DoubleTensor

    @property
    def FloatTensor(self):
        return torch.cuda.FloatTensor

    @property
    def HalfTensor(self):
        return torch.cuda.HalfTensor

    @property
    def IntTensor(self):
        return torch.cuda.IntTensor

    @property
    def LongTensor(self):
        return torch.cuda.LongTensor

    def pin_memory(self, tensor, make_copy=True, match_shape=True):
        backend = os.environ.get("DS_PIN_MEMORY_BACKEND", "torch")
        if backend != "torch":
            raise ValueError(
                f"the environment variable DS_PIN_MEMORY_BACKEND is {backend!r}, but this build pins memory through "
                f"'torch' only: unset the variable or set it to 'torch'."
            )
        pinned = tensor.pin_memory() if make_copy else torch.empty_like(tensor, device="cpu", pin_memory=True)
        return pinned if match_shape else pinned.reshape(-1)

    def is_pinned(self, tensor):
        return tensor.is_pinned()

    def unpin_memory(self, tensor):
        pass  # torch's host allocator takes the pages back when the last view of the tensor dies

    def on_accelerator(self, tensor):
        return tensor.device.type == "cuda"

    # ---- native ops ----------------------------------------------------------------------------------------------
    def op_builder_dir(self):
        return "deepspeed.ops.op_builder"

    # ---- environment ---------------------------------------------------------------------------------------------
    def export_envs(self):
        return ["NCCL"]

    def visible_devices_envs(self):
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env, local_accelerator_ids):
        current_env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, local_accelerator_ids))
