"""Intel Gaudi through ``habana_frameworks.torch.hpu``."""

import importlib
import os

import torch

from deepspeed.accelerator.abstract_accelerator import constant, of_device
from deepspeed.accelerator.torch_module import TorchModuleAccelerator
from deepspeed.host.vendors import VENDORS


class HPU_Accelerator(TorchModuleAccelerator):
    """Gaudi as its guide describes it. Deterministic algorithms are on. ``hpu``: the module of the verbs."""

    _name = "hpu"
    _compile_backend = "hpu_backend"

    def __init__(self):
        if not VENDORS["hpu"].missing():
            self.apply_hpu_workarounds()  # before the module reads them
        super().__init__()
        self.hpu = self.module
        torch.use_deterministic_algorithms(True)

    def apply_hpu_workarounds(self):
        """Sets two variables of Gaudi's software, unless the user has."""
        os.environ.setdefault("PT_HPU_LAZY_ACC_PAR_MODE", "0")
        os.environ.setdefault("PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES", "0")

    # ---- kind of device ------------------------------------------------------------------------------------------
    resolves_data_dependency = constant(True)
    handles_memory_backpressure = constant(True)

    # ---- devices -------------------------------------------------------------------------------------------------
    device_name = of_device(lambda index: "hpu")  # a process has one

    def device(self, device_index=None):
        return torch.device(self.device_name(device_index))

    def current_device_name(self):
        return "hpu"

    def synchronize(self, device_index=None):
        return self.hpu.synchronize()

    # ---- random numbers ------------------------------------------------------------------------------------------
    @property
    def _random(self):
        return getattr(self.hpu, "random", None) or importlib.import_module("habana_frameworks.torch.hpu.random")

    def set_rng_state(self, new_state, device_index=None):
        self._random.set_rng_state(new_state)

    def get_rng_state(self, device_index=None):
        return self._random.get_rng_state()

    def manual_seed(self, seed):
        return self._random.manual_seed(seed)

    def manual_seed_all(self, seed):
        return self._random.manual_seed_all(seed)

    def initial_seed(self):
        return self._random.initial_seed()

    def default_generator(self, device_index):
        return self._random.default_generators[device_index]

    # ---- memory --------------------------------------------------------------------------------------------------
    def total_memory(self, device_index=None):
        return self.memory_stats(device_index)["Limit"]

    def available_memory(self, device_index=None):
        return self.total_memory(device_index) - self.memory_allocated(device_index)

    # ---- dtypes --------------------------------------------------------------------------------------------------
    is_bf16_supported = constant(True)

    def is_fp16_supported(self):
        return importlib.import_module("habana_frameworks.torch.utils.experimental")._is_fp16_supported()

    # ---- graphs --------------------------------------------------------------------------------------------------
    def create_graph(self):
        return self.hpu.HPUGraph()

    def capture_to_graph(self, graph, pool=None, stream=None):
        return self.hpu.graph(graph, stream=stream)
