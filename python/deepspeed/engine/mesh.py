"""The ranks of an engine: its caller's, or those that its configuration or ``mesh_param`` asks for."""

import torch

from deepspeed import comm as dist
from deepspeed.comm.mesh_views import EngineMesh
from deepspeed.config.world import MESH_DIMENSION, SEQUENCE_DIMENSION, MeshShape
from deepspeed.utils import groups


def mesh_of(engine, mpu):
    """The ``EngineMesh`` of an engine. Every rank of the job calls it. Without an mpu ``engine.mesh_device`` becomes
    torch's mesh, where torch has them."""
    if mpu is not None:
        return EngineMesh(mpu)
    size = engine._config.sequence_parallel_size or 1
    if (
        isinstance(engine.mesh_device, MeshShape)
        and hasattr(torch.distributed, "init_device_mesh")
        and dist.is_initialized()
    ):
        names = (MESH_DIMENSION, SEQUENCE_DIMENSION)
        engine.mesh_device = dist.initialize_mesh_device(engine.mesh_device.shape, names)
    if engine.mesh_device is not None and size > 1:
        groups._use_mesh(engine.mesh_device)
    elif size > 1:
        groups._create_sequence_parallel(size)
    tensor = max(engine._config.tensor_parallel_config.autotp_size, 1)
    made = EngineMesh(sp=(size, "sequence_parallel_size"), tp=(tensor, "tensor_parallel.autotp_size"))
    if tensor > 1:
        groups._use_tensor_ranks(made.mesh)
    return made
