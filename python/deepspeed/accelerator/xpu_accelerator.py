"""Intel's GPUs through ``torch.xpu``."""

from deepspeed.accelerator.torch_module import TorchModuleAccelerator


class XPU_Accelerator(TorchModuleAccelerator):
    """The verbs of ``torch.xpu``."""

    _name = "xpu"
