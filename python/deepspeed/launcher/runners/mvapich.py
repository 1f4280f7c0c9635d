"""MVAPICH2's mpirun."""

import contextlib
import os
import subprocess

from deepspeed.host.programs import find_program
from deepspeed.launcher.constants import MVAPICH_LAUNCHER, MVAPICH_TMP_HOSTFILE
from deepspeed.launcher.launch import write_new
from deepspeed.launcher.runners.base import MPIRunner

# Variables that MVAPICH2 needs for Python processes that use torch.
_EXPORTS = {
    "MV2_SMP_USE_CMA": "0",  # not allowed in most containers
    "MV2_DEBUG_SHOW_BACKTRACE": "1",
    "MV2_USE_CUDA": "1",
    "MV2_SUPPORT_DL": "1",  # torch is loaded after MPI
    "MV2_ENABLE_AFFINITY": "0",  # it would bind all threads of a rank to one core
    "MV2_INTER_ALLGATHER_TUNING": "5",
    "MV2_CUDA_USE_NAIVE": "0",
}


class MVAPICHRunner(MPIRunner):
    """Every host has the same number of ranks; the file ``MVAPICH_TMP_HOSTFILE`` lists the hosts."""

    name = MVAPICH_LAUNCHER
    package = "install MVAPICH2"
    maker, others = "MVAPICH2", ("Open MPI", "Spectrum MPI")

    def __init__(self, args, world_info_base64, resource_pool):
        super().__init__(args, world_info_base64, resource_pool)
        self._written = None
        self.exports.update(_EXPORTS)

    def backend_exists(self):
        """Whether the MPI on the path is MVAPICH2, by its version text."""
        if find_program("mpiname") is None:
            return False
        said = subprocess.run(["mpiname"], capture_output=True, text=True, check=False).stdout
        return "MVAPICH" in said.upper()

    def get_cmd(self, environment, active_resources):
        count, hosts = self.equal_count(), self.counts()
        self._written = _identity(write_new(MVAPICH_TMP_HOSTFILE, [host + "\n" for host in hosts]))
        command = ["mpirun", "-np", str(count * len(hosts)), "-ppn", str(count), "--hostfile", MVAPICH_TMP_HOSTFILE]
        return command + self.launcher_words() + self.take_exports(environment) + self.rank_words()

    def tidy(self):
        """Removes the file of hosts, unless another job has written it meanwhile."""
        with contextlib.suppress(FileNotFoundError):
            if self._written is not None and _identity(os.stat(MVAPICH_TMP_HOSTFILE)) == self._written:
                os.unlink(MVAPICH_TMP_HOSTFILE)


def _identity(status):
    return status.st_dev, status.st_ino, status.st_mtime_ns
