"""Import path that existing scripts use: the classes of runners for several hosts."""

from deepspeed.launcher.runners.base import MultiNodeRunner
from deepspeed.launcher.runners.impi import IMPIRunner
from deepspeed.launcher.runners.mpich import MPICHRunner
from deepspeed.launcher.runners.mvapich import MVAPICHRunner
from deepspeed.launcher.runners.openmpi import OpenMPIRunner
from deepspeed.launcher.runners.pdsh import PDSHRunner
from deepspeed.launcher.runners.slurm import SlurmRunner
from deepspeed.launcher.runners.ssh import SSHRunner

__all__ = [
    "IMPIRunner",
    "MPICHRunner",
    "MVAPICHRunner",
    "MultiNodeRunner",
    "OpenMPIRunner",
    "PDSHRunner",
    "SSHRunner",
    "SlurmRunner",
]
