"""Cambricon's devices through ``torch.mlu``, which the package torch_mlu brings."""

from deepspeed.accelerator.torch_module import TorchModuleAccelerator


class MLU_Accelerator(TorchModuleAccelerator):
    """The verbs of ``torch.mlu``."""

    _name = "mlu"
