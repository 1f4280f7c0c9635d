"""Biren's devices through ``torch.supa``, which the package torch_supa brings."""

from deepspeed.accelerator.torch_module import TorchModuleAccelerator


class SUPA_Accelerator(TorchModuleAccelerator):
    """The verbs of ``torch.supa``."""

    _name = "supa"
