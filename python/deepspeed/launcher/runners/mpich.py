"""MPICH's mpirun (hydra)."""

from deepspeed.launcher.constants import MPICH_LAUNCHER
from deepspeed.launcher.runners.base import MPIRunner, hosts_of


class MPICHRunner(MPIRunner):
    """Hosts of different sizes are named with their numbers of ranks."""

    name = MPICH_LAUNCHER
    package = "apt install mpich"
    maker, others, debian = "MPICH", ("Open MPI", "Spectrum MPI"), "mpirun.mpich"

    def get_cmd(self, environment, active_resources):
        counts = self.counts()
        hosts = ["-hosts", ",".join(f"{host}:{count}" for host, count in counts.items())]
        if len(set(counts.values())) == 1:
            hosts = ["-ppn", str(next(iter(counts.values()))), "-hosts", hosts_of(counts)]
        command = ["mpirun", "-n", str(sum(counts.values())), *hosts, *self.launcher_words()]
        return command + self.take_exports(environment) + self.rank_words()
