"""The published backends of a compressed all-reduce, with the constructors that scripts call."""

from deepspeed.comm.mpi_exchange import mpi_communicator
from deepspeed.comm.sign_means import SignMeans
from deepspeed.ops.codes import code_ops


class NcclBackend(SignMeans):
    """A compressed all-reduce over the data-parallel ranks of ``mpu``, or over all ranks."""

    def __init__(self, mpu=None):
        super().__init__(None if mpu is None else mpu.get_data_parallel_group())


class HcclBackend(NcclBackend):
    """The same on Gaudi and Ascend."""


class CompressedBackend(NcclBackend):
    """The same, and signs as bytes."""

    def pack(self, buffer, size):
        """The signs of ``buffer`` as bytes, first element in the highest bit, in ``size`` rows."""
        return code_ops().pack_signs(buffer).reshape(size, -1)

    def unpack(self, buffer, size, dtype):
        """1 or -1 for each bit of ``buffer``, in ``size`` rows."""
        flat = buffer.reshape(-1)
        return code_ops().unpack_signs(flat, 8 * len(flat)).reshape(size, -1).to(dtype)


class MpiBackend(SignMeans):
    """The same over MPI. ``cuda_aware``: MPI reads memory of the device."""

    def __init__(self, cuda_aware):
        super().__init__(communicator=mpi_communicator(cuda_aware))
