"""Huawei's Ascend through ``torch.npu``, which the package torch_npu brings."""

from deepspeed.accelerator.torch_module import TorchModuleAccelerator


class NPU_Accelerator(TorchModuleAccelerator):
    """The verbs of ``torch.npu``."""

    _name = "npu"
