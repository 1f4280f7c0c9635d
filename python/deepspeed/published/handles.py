"""Small objects of the published interface: handles of gathers, the contents of a bucket, a weight quantizer."""

import dataclasses
from typing import List

import torch

from deepspeed.log import logger
from deepspeed.ops.codes import code_ops


class MultipleAllGatherHandles:
    """Several handles as one; each has ``wait``."""

    def __init__(self, handles):
        self.handles = list(handles)
        self.complete = False

    def wait(self, handle_dependency=True):
        """Returns when all of them are done; a second call returns at once.

        ``handle_dependency`` goes to handles that are groups of handles themselves.
        """
        if self.complete:
            return
        for handle in self.handles:
            if isinstance(handle, MultipleAllGatherHandles):
                handle.wait(handle_dependency=handle_dependency)
            else:
                handle.wait()
        self.complete = True


@dataclasses.dataclass
class IPGBucket:
    """Gradients that are reduced together: flat ``buffer``s of which number ``index`` is being filled, the ``params``
    and ``grads`` in it, and their ``elements``."""

    buffer: List[torch.Tensor] = dataclasses.field(default_factory=list)
    params: List[torch.Tensor] = dataclasses.field(default_factory=list)
    grads: List[torch.Tensor] = dataclasses.field(default_factory=list)
    elements: int = 0
    index: int = 0
    has_moe_params: bool = False
    copy_streams: set = dataclasses.field(default_factory=set)

    def clear(self):
        """Empty again; the buffers and ``index`` stay."""
        self.params.clear()
        self.grads.clear()
        self.copy_streams.clear()
        self.elements = 0
        self.has_moe_params = False


class CUDAQuantizer:
    """Symmetric 8-bit quantization in groups of equally many elements; on any device.

    Source: Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training" (2023), 3.1.
    """

    async_flag = True
    target_group_size = 8000  # the largest number of elements that share a scale
    group_size_cache = {}  # numel -> number of groups
    quantizer_cuda_module = None

    def quantize(self, param, groups=None):
        """``(int8 tensor of the same shape, fp32 scale of each of `groups` groups)``.

        Without ``groups`` they are the fewest equal ones of at most ``target_group_size`` elements.
        """
        if groups is None:
            numel = param.numel()
            if numel not in self.group_size_cache:
                groups = max(1, -(-numel // self.target_group_size))
                while numel % groups:
                    groups += 1
                self.group_size_cache[numel] = groups
            groups = self.group_size_cache[numel]
        codes, scale = code_ops().encode(param, groups, 8, False)
        return codes.view(torch.int8).view(param.shape), scale.reshape(-1)

    def dequantize(self, quantized_param, scale, dtype=None):
        """The values again, each off by at most half a scale; in ``dtype`` (default fp16)."""
        values = code_ops().decode(quantized_param, scale, scale.numel(), 8, False, 1, dtype or torch.float16)
        return values.view(quantized_param.shape)


def print_rank_0(message, debug=False, force=False):
    """Logs ``message`` on rank 0, where ``debug`` or ``force`` asks for it."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if rank == 0 and (debug or force):
        logger.info(message)
