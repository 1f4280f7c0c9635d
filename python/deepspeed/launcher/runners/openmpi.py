"""Open MPI's mpirun."""

from deepspeed.launcher.constants import OPENMPI_LAUNCHER
from deepspeed.launcher.runners.base import MPIRunner


class OpenMPIRunner(MPIRunner):
    """It reads the hostfile itself; ``--launcher_args`` may name the network interface (btl_tcp_if_include)."""

    name = OPENMPI_LAUNCHER
    reads_hostfile = True
    package = "apt install openmpi-bin"
    maker, others, debian = "Open MPI", ("HYDRA", "Intel"), "mpirun.openmpi"

    def get_cmd(self, environment, active_resources):
        given = self.launcher_words()
        command = ["mpirun", "-n", str(sum(self.counts().values())), "-hostfile", str(self.args.hostfile)]
        command += ["--mca", "btl", "^openib"]
        if not any("btl_tcp_if_include" in word for word in given):
            command += ["--mca", "btl_tcp_if_include", "eth0"]
        command += given
        environment.update(self.exports)
        return [*command, *(word for name in self.exports for word in ("-x", name)), *self.rank_words()]
