"""The kinds of devices: where the verbs of each are, how its ranks talk, and its environment variables. Imports no
torch."""

from typing import NamedTuple

from deepspeed.host.packages import is_installed


class Vendor(NamedTuple):
    """One kind of device.

    name: torch's device type. package: the Python package that brings it. verbs: the module with the functions of
    ``torch.cuda``; one of torch appears when the package is imported. backends: torch.distributed's backends for its
    memory, the best first, with the module that registers each ("": none is needed). visible: the variable that chooses
    among the devices of a host. prefixes: of the variables that other hosts get from the head.
    """

    name: str
    package: str = "torch"
    verbs: str = ""
    backends: tuple = ()
    visible: str = ""
    prefixes: tuple = ()

    def missing(self):
        """The reason why the package cannot be imported, or an empty text."""
        if is_installed(self.package):
            return ""
        return f"the Python package {self.package} is not installed"


# In the order in which they are looked for; packages from entry points go before them.
VENDORS = {
    vendor.name: vendor
    for vendor in (
        Vendor("xpu", "torch", "torch.xpu", (("xccl", ""), ("ccl", "oneccl_bindings_for_pytorch")),
               "ZE_AFFINITY_MASK", ("CCL", "ZE_")),
        Vendor("npu", "torch_npu", "torch.npu", (("hccl", "torch_npu"),),
               "ASCEND_RT_VISIBLE_DEVICES", ("ASCEND", "HCCL")),
        Vendor("sdaa", "torch_sdaa", "torch.sdaa", (("tccl", "torch_sdaa"),), "SDAA_VISIBLE_DEVICES", ("SDAA", "TCCL")),
        Vendor("mps", "torch", "torch.mps"),
        Vendor("hpu", "habana_frameworks", "habana_frameworks.torch.hpu",
               (("hccl", "habana_frameworks.torch.distributed.hccl"),), "HABANA_VISIBLE_MODULES",
               ("HCCL", "PT_HPU", "HABANA", "TENSORS_KEEP_ALLOCATED", "ENABLE_EXPERIMENTAL_FLAGS")),
        Vendor("mlu", "torch_mlu", "torch.mlu", (("cncl", "torch_mlu"),), "MLU_VISIBLE_DEVICES", ("NEUWARE", "CNCL")),
        Vendor("supa", "torch_supa", "torch.supa", (("bccl", "torch_supa"),), "SUPA_VISIBLE_DEVICES", ("SUPA", "BCCL")),
        Vendor("cuda", "torch", "torch.cuda", (("nccl", ""),), "CUDA_VISIBLE_DEVICES", ("NCCL",)),
        Vendor("cpu", "torch", "", (("gloo", ""), ("ccl", "oneccl_bindings_for_pytorch"))),
    )
}  # fmt: skip


def registering_module(backend, device):
    """The module that registers a backend of torch.distributed when it is imported, by the row of the device or else by
    another one; an empty text where none is needed or known."""
    rows = [VENDORS[device]] if device in VENDORS else []
    found = [dict(row.backends)[backend] for row in [*rows, *VENDORS.values()] if backend in dict(row.backends)]
    return found[0] if found else ""
