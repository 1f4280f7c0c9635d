"""Tecorigin's devices through ``torch.sdaa``, which the package torch_sdaa brings."""

from deepspeed.accelerator.torch_module import TorchModuleAccelerator


class SDAA_Accelerator(TorchModuleAccelerator):
    """The verbs of ``torch.sdaa``."""

    _name = "sdaa"
