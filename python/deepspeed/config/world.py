"""The number of data-parallel ranks that the batch rules need, and where it came from."""

import os

import torch

from deepspeed._native import DeepSpeedConfigError

MESH_DIMENSION = "data_parallel"
ENVIRONMENT = "the environment variable WORLD_SIZE"
UNKNOWN = "no WORLD_SIZE is set"


def _mesh_size(mesh):
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return mesh.size(names.index(MESH_DIMENSION)) if MESH_DIMENSION in names else mesh.size(0)


def total_ranks(world_size=None, given_as="world_size="):
    """``(ranks, source)`` of the whole job: ``world_size``, the process group's, WORLD_SIZE; else 1, from UNKNOWN."""
    if world_size is not None:
        return int(world_size), given_as
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), "the process group"
    text = os.environ.get("WORLD_SIZE", "")
    if not text:
        return 1, UNKNOWN
    if not text.strip().isdigit() or int(text) < 1:
        raise DeepSpeedConfigError(f"The environment variable WORLD_SIZE is {text!r}. It must be a positive integer.")
    return int(text), ENVIRONMENT


def data_parallel_size(
    mpu=None, mesh_device=None, world_size=None, sequence_parallel_size=None, given_as="world_size="
):
    """``(ranks, source)``: from the mpu, the mesh, ``world_size``, the process group, or WORLD_SIZE; else 1.

    Without mpu and mesh the total is divided by ``sequence_parallel_size``.
    """
    if mpu is not None:
        return int(mpu.get_data_parallel_world_size()), "mpu.get_data_parallel_world_size()"
    if mesh_device is not None:
        return int(_mesh_size(mesh_device)), f"dimension {MESH_DIMENSION} of the device mesh"
    total, source = total_ranks(world_size, given_as)
    shared = sequence_parallel_size or 1
    if shared == 1:
        return total, source
    if total % shared:
        raise DeepSpeedConfigError(
            f"sequence_parallel_size = {shared} does not divide the {total} ranks ({source}). "
            f"Choose a divisor of {total}."
        )
    return total // shared, f"{total} ranks ({source}) / sequence_parallel_size {shared}"
