"""Apple's GPUs through ``torch.mps``: one device, without streams that programs choose, for one rank."""

import contextlib

from deepspeed.accelerator.abstract_accelerator import constant, of_device
from deepspeed.accelerator.torch_module import TorchModuleAccelerator


class MPS_Accelerator(TorchModuleAccelerator):
    """``torch.mps``, as far as it goes. Peaks of memory are what is in use at the moment: torch keeps none."""

    _name = "mps"
    _compile_backend = "aot_eager"

    use_host_timers = constant(True)

    # ---- devices -------------------------------------------------------------------------------------------------
    device = of_device(lambda index: contextlib.nullcontext())
    current_device = constant(0)

    def current_device_name(self):
        return "mps:0"

    def set_device(self, device_index):
        pass  # there is one

    def synchronize(self, device_index=None):
        return self.module.synchronize()

    def device_count(self):
        return self.module.device_count() if hasattr(self.module, "device_count") else 1

    # ---- random numbers ------------------------------------------------------------------------------------------
    def set_rng_state(self, new_state, device_index=None):
        return self.module.set_rng_state(new_state)

    def get_rng_state(self, device_index=None):
        return self.module.get_rng_state()

    def manual_seed_all(self, seed):
        return self.module.manual_seed(seed)

    def initial_seed(self):
        return self.default_generator(0).initial_seed()

    def default_generator(self, device_index):
        return self.module._get_default_mps_generator()

    # ---- streams and events --------------------------------------------------------------------------------------
    Stream = property(constant(None))
    Event = property(constant(None))
    current_stream = default_stream = of_device(lambda index: None)

    def stream(self, stream):
        return contextlib.nullcontext()

    # ---- memory --------------------------------------------------------------------------------------------------
    def memory_allocated(self, device_index=None):
        return self.module.current_allocated_memory()

    def memory_reserved(self, device_index=None):
        return self.module.driver_allocated_memory()

    max_memory_allocated = memory_allocated
    max_memory_reserved = memory_reserved

    def memory_stats(self, device_index=None):
        used = self.memory_allocated()
        return {"allocated_bytes.all.current": used, "allocated_bytes.all.peak": used}

    def reset_peak_memory_stats(self, device_index=None):
        pass

    def total_memory(self, device_index=None):
        return self.module.recommended_max_memory()

    # ---- dtypes --------------------------------------------------------------------------------------------------
    is_bf16_supported = constant(True)

    # ---- tensors -------------------------------------------------------------------------------------------------
    def pin_memory(self, tensor, make_copy=True, match_shape=True):
        return tensor if match_shape else tensor.reshape(-1)  # the device shares main memory
