"""NVIDIA GPUs through ``torch.cuda``. Importable without a driver; touches the driver on first use only."""

import importlib
import importlib.util

import torch

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator, constant, of_device
from deepspeed.accelerator.native_pinning import get_active_native_pinned_memory
from deepspeed.host.devices import nvidia_device_count


def probe():
    """Whether this process sees a GPU and its torch can use it; a text that says why not. Creates no context."""
    if not torch.backends.cuda.is_built():
        return "this torch is built without CUDA"
    if torch.version.cuda and nvidia_device_count() == 0:
        return "no NVIDIA GPU on this machine"
    # Through NVML, where torch can: the runtime's own count would make CUDA unusable in forked children.
    return torch.cuda.device_count() > 0 or "torch sees no usable GPU (CUDA_VISIBLE_DEVICES, driver version)"


def _of_device(name):
    return of_device(lambda index: getattr(torch.cuda, name)(index))


def _call(name):
    return lambda self: getattr(torch.cuda, name)()


class CUDA_Accelerator(DeepSpeedAccelerator):
    """``torch.cuda`` word for word."""

    _name = "cuda"
    _communication_backend_name = "nccl"

    def __init__(self):
        self._nvtx = importlib.import_module("nvtx") if importlib.util.find_spec("nvtx") else None
        self.supports_nvtx_domain = self._nvtx is not None
        self._seen = False  # a GPU was found; asked in hot paths, and a GPU does not go away

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
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def set_device(self, device_index):
        torch.cuda.set_device(device_index)

    def current_device_name(self):
        return f"cuda:{torch.cuda.current_device()}"

    def is_available(self):
        self._seen = self._seen or probe() is True
        return self._seen

    # ---- random numbers ------------------------------------------------------------------------------------------
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

    initial_seed = _call("initial_seed")

    def default_generator(self, device_index):
        torch.cuda.init()  # fills the tuple below
        return torch.cuda.default_generators[device_index]

    # ---- streams and events --------------------------------------------------------------------------------------
    Stream = property(lambda self: torch.cuda.Stream)
    Event = property(lambda self: torch.cuda.Event)
    current_stream = _of_device("current_stream")
    default_stream = _of_device("default_stream")

    def stream(self, stream):
        return torch.cuda.stream(stream)

    # ---- memory --------------------------------------------------------------------------------------------------
    empty_cache = _call("empty_cache")
    memory_allocated = _of_device("memory_allocated")
    max_memory_allocated = _of_device("max_memory_allocated")
    memory_stats = _of_device("memory_stats")
    reset_peak_memory_stats = _of_device("reset_peak_memory_stats")
    memory_reserved = _of_device("memory_reserved")
    max_memory_reserved = _of_device("max_memory_reserved")

    def total_memory(self, device_index=None):
        index = torch.cuda.current_device() if device_index is None else device_index
        return torch.cuda.get_device_properties(index).total_memory

    def available_memory(self, device_index=None):
        """Bytes that the driver has free, plus those that torch's allocator holds without using them."""
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
        kinds = ((torch.float16, self.is_fp16_supported()), (torch.bfloat16, self.is_bf16_supported()))
        return [torch.float32, *(dtype for dtype, supported in kinds if supported)]

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
        return ["NCCL"]

    def visible_devices_envs(self):
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env, local_accelerator_ids):
        current_env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, local_accelerator_ids))
