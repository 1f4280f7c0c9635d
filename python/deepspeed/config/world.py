"""The number of data-parallel ranks that the batch rules need, and where it came from."""

import os

import torch

from deepspeed import _native
from deepspeed._native import DeepSpeedConfigError

MESH_DIMENSION, SEQUENCE_DIMENSION = "data_parallel", "sequence_parallel"
ENVIRONMENT = "the environment variable WORLD_SIZE"
UNKNOWN = "no WORLD_SIZE is set"


def job_grid(ranks, **axes):
    """The native ``ProcessGrid`` of a job of ``ranks``: the axes pp, dp, sp and tp, outer to inner.

    ``axes``: ``(size, key)`` of an axis by its name, where ``key`` is what a user calls that size. Other axes have one
    rank, but for dp, which has the ranks that are left. An axis of another name is the innermost. ValueError where the
    sizes do not fit, with sizes that do.
    """
    sizes = {"pp": (1, ""), "dp": (0, ""), "sp": (1, ""), "tp": (1, ""), **axes}
    return _native._C.ProcessGrid(ranks, [(axis, *size) for axis, size in sizes.items()])


class MeshShape:
    """The sizes of a mesh of data- and sequence-parallel ranks, asked as a torch ``DeviceMesh`` is."""

    mesh_dim_names = (MESH_DIMENSION, SEQUENCE_DIMENSION)

    def __init__(self, sizes):
        wrong = DeepSpeedConfigError(
            f"mesh_param is {sizes!r}: it must be (data-parallel ranks, sequence-parallel ranks), two positive integers"
        )
        try:
            self.shape = tuple(int(size) for size in sizes)
        except (TypeError, ValueError):
            raise wrong from None
        if len(self.shape) != 2 or min(self.shape) < 1:
            raise wrong

    def size(self, dimension):
        return self.shape[dimension]


def sequence_ranks(mpu):
    """The number of ranks that share one sequence according to ``mpu``; None if it has no such method."""
    ask = getattr(mpu, "get_sequence_parallel_world_size", None)
    return None if ask is None else int(ask())


def sequence_size(given, mpu=None, mesh_device=None):
    """``(ranks that share a sequence, source)``: from the mpu, the mesh, or ``given``, what the configuration says."""
    names = getattr(mesh_device, "mesh_dim_names", None) or ()
    told, source = sequence_ranks(mpu), getattr(mpu, "sequence_source", "mpu.get_sequence_parallel_world_size()")
    if told == 1 and given is None and hasattr(mpu, "sequence_source"):  # a grid without such an axis
        return None, ""
    if told is None and mpu is None and SEQUENCE_DIMENSION in names:
        told, source = int(mesh_device.size(names.index(SEQUENCE_DIMENSION))), "the device mesh (mesh_param)"
    if told is not None and given is not None and given != told:
        raise DeepSpeedConfigError(
            f"sequence_parallel_size is {given}, but {source} says {told}. Make them equal, or leave one out."
        )
    if told is None and mpu is not None and (given or 1) > 1:
        raise DeepSpeedConfigError(
            f"sequence_parallel_size is {given}, but the mpu has no get_sequence_parallel_world_size(): give it "
            "sequence-parallel groups, pass deepspeed.runtime.sequence_parallel.parallel_state_sp, or no mpu."
        )
    return (given, "") if told is None else (told, source)


def check_data_parallel_size(given, world, source):
    """``given``: what the configuration says beside ``sequence_parallel_size``."""
    if given is not None and given != world and UNKNOWN not in source:
        raise DeepSpeedConfigError(
            f"data_parallel_size is {given}, but there are {world} data-parallel ranks: {source}. data_parallel_size x "
            "sequence_parallel_size is the number of ranks; correct it, or leave it out."
        )


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
    if isinstance(mesh_device, MeshShape):
        data, shared = mesh_device.shape
        total, source = total_ranks(world_size, given_as)
        if data * shared != total and source != UNKNOWN:
            raise DeepSpeedConfigError(
                f"mesh_param = ({data}, {shared}) makes {data * shared} ranks, but there are {total} ({source})."
            )
    if mesh_device is not None:
        names = getattr(mesh_device, "mesh_dim_names", None) or ()
        dimension = names.index(MESH_DIMENSION) if MESH_DIMENSION in names else 0
        return int(mesh_device.size(dimension)), f"dimension {MESH_DIMENSION} of the device mesh"
    total, source = total_ranks(world_size, given_as)
    shared = sequence_parallel_size or 1
    if shared == 1:
        return total, source
    try:
        ranks = job_grid(total, sp=(shared, "sequence_parallel_size")).size(["dp"])
    except ValueError as error:
        raise DeepSpeedConfigError(f"{error} ({source} tells the number of ranks)") from None
    return ranks, f"{total} ranks ({source}) / sequence_parallel_size {shared}"
