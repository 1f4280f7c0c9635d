"""The backend ``hccl`` of torch.distributed: gloo, of which deepspeed knows that it goes through the host."""

import torch.distributed as dist


def create(store, rank, size, timeout):
    """A gloo backend for memory of the device and of the host."""
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


if not hasattr(dist.Backend, "HCCL"):
    dist.Backend.register_backend("hccl", create, devices=["cpu", "hpu"])
