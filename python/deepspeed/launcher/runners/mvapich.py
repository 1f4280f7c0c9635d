"""MVAPICH2's mpirun."""

import contextlib
import os
import subprocess

from deepspeed.host.programs import find_program
from deepspeed.launcher.constants import MVAPICH_LAUNCHER, MVAPICH_TMP_HOSTFILE
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

    package = "install MVAPICH2"
    maker, others = "MVAPICH2", ("Open MPI", "Spectrum MPI")

    def __init__(self, args, world_info_base64, resource_pool):
        super().__init__(args, world_info_base64, resource_pool)
        self._written = None
        for name, value in _EXPORTS.items():
            self.add_export(name, value)

    @property
    def name(self):
        return MVAPICH_LAUNCHER

    def backend_exists(self):
        """Whether the MPI on the path is MVAPICH2, by its version text."""
        if find_program("mpiname") is None:
            return False
        said = subprocess.run(["mpiname"], capture_output=True, text=True, check=False).stdout
        return "MVAPICH" in said.upper()

    def get_cmd(self, environment, active_resources):
        count = self.equal_count()
        hosts = list(self.counts())
        self._written = _write_hosts(hosts)
        command = ["mpirun", "-np", str(count * len(hosts)), "-ppn", str(count), "--hostfile", MVAPICH_TMP_HOSTFILE]
        command += self.launcher_words()
        names = self.take_exports(environment)
        return command + ["-genvlist", ",".join(names)] + self.rank_words()

    def tidy(self):
        """Removes the file of hosts, unless another job has written it meanwhile."""
        with contextlib.suppress(FileNotFoundError):
            if self._written is not None and _identity(os.stat(MVAPICH_TMP_HOSTFILE)) == self._written:
                os.unlink(MVAPICH_TMP_HOSTFILE)


def _identity(status):
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _write_hosts(hosts):
    # The name is published, and all users can write to its folder: a link that another user made there is not followed.
    descriptor = os.open(MVAPICH_TMP_HOSTFILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.writelines(host + "\n" for host in hosts)
        file.flush()
        return _identity(os.fstat(descriptor))
