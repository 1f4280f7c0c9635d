"""The runners, which start jobs on several hosts, by their names for ``--launcher``."""

from deepspeed.registry import Registry

RUNNERS = Registry("launcher", group="deepspeed.launchers")
RUNNERS.register("ssh", "deepspeed.launcher.runners.ssh:SSHRunner")
RUNNERS.register("pdsh", "deepspeed.launcher.runners.pdsh:PDSHRunner")
RUNNERS.register("slurm", "deepspeed.launcher.runners.slurm:SlurmRunner")
RUNNERS.register("openmpi", "deepspeed.launcher.runners.openmpi:OpenMPIRunner")
RUNNERS.register("mpich", "deepspeed.launcher.runners.mpich:MPICHRunner")
RUNNERS.register("impi", "deepspeed.launcher.runners.impi:IMPIRunner")
RUNNERS.register("mvapich", "deepspeed.launcher.runners.mvapich:MVAPICHRunner")
