"""NVIDIA GPUs through ``torch.cuda``. Importable without a driver; touches the driver on first use only."""

import importlib

import torch

from deepspeed.accelerator.torch_module import TorchModuleAccelerator
from deepspeed.host.devices import nvidia_device_count
from deepspeed.host.packages import is_installed


def probe():
    """Whether this process sees a GPU and its torch can use it; a text that says why not. Creates no context."""
    if not torch.backends.cuda.is_built():
        return "this torch is built without CUDA"
    if torch.version.cuda and nvidia_device_count() == 0:
        return "no NVIDIA GPU on this machine"
    # Through NVML, where torch can: the runtime's own count would make CUDA unusable in forked children.
    return torch.cuda.device_count() > 0 or "torch sees no usable GPU (CUDA_VISIBLE_DEVICES, driver version)"


class CUDA_Accelerator(TorchModuleAccelerator):
    """``torch.cuda`` word for word."""

    _name = "cuda"

    def __init__(self):
        super().__init__()
        self._nvtx = importlib.import_module("nvtx") if is_installed("nvtx") else None
        self.supports_nvtx_domain = self._nvtx is not None
        self._seen = False  # a GPU was found; asked in hot paths, and a GPU does not go away

    def is_available(self):
        self._seen = self._seen or probe() is True
        return self._seen

    def default_generator(self, device_index):
        torch.cuda.init()  # fills the tuple
        return super().default_generator(device_index)

    def _major(self):
        """The first number of the compute capability; 0 without a GPU."""
        return torch.cuda.get_device_properties(torch.cuda.current_device()).major if self.is_available() else 0

    # ---- dtypes --------------------------------------------------------------------------------------------------
    def is_bf16_supported(self):
        return self.is_available() and torch.cuda.is_bf16_supported()

    def is_fp16_supported(self):
        # From compute capability 7.0 on (tensor cores); Pascal's fp16 arithmetic is a slow subset of it.
        return bool(torch.version.hip) or self._major() >= 7

    # ---- profiling and start-up ----------------------------------------------------------------------------------
    def range_push(self, msg, domain=None, category=None):
        if domain is not None and self._nvtx is not None:
            return self._nvtx.push_range(msg, domain=domain, category=category)
        return torch.cuda.nvtx.range_push(msg) if self.is_available() else None

    def range_pop(self, domain=None):
        if domain is not None and self._nvtx is not None:
            return self._nvtx.pop_range(domain=domain)
        return torch.cuda.nvtx.range_pop() if self.is_available() else None

    def is_triton_supported(self):
        return not torch.version.hip and self._major() >= 8

    # ---- tensors -------------------------------------------------------------------------------------------------
    def register_host_memory(self, tensor):
        return self._registered(torch.cuda.cudart().cudaHostRegister, tensor.data_ptr(), tensor.nbytes, 0)

    def unregister_host_memory(self, tensor):
        return self._registered(torch.cuda.cudart().cudaHostUnregister, tensor.data_ptr())

    @staticmethod
    def _registered(call, *given):
        torch.cuda.check_error(int(call(*given)))
        return True
