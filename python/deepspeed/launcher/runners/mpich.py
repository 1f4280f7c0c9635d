"""MPICH's mpirun (hydra)."""

from deepspeed.launcher.constants import MPICH_LAUNCHER
from deepspeed.launcher.runners.base import MPIRunner, hosts_of


class MPICHRunner(MPIRunner):
    """Hosts of different sizes are named with their numbers of ranks."""

    package = "apt install mpich"
    maker, others, debian = "MPICH", ("Open MPI", "Spectrum MPI"), "mpirun.mpich"

    @property
    def name(self):
        return MPICH_LAUNCHER

    def hosts(self):
        """Options with the hosts and their numbers of ranks."""
        counts = self.counts()
        total = ["-n", str(sum(counts.values()))]
        if len(set(counts.values())) == 1:
            return total + ["-ppn", str(next(iter(counts.values()))), "-hosts", hosts_of(counts)]
        return total + ["-hosts", ",".join(f"{host}:{count}" for host, count in counts.items())]

    def get_cmd(self, environment, active_resources):
        command = ["mpirun", *self.hosts(), *self.launcher_words()]
        names = self.take_exports(environment)
        if names:
            command += ["-genvlist", ",".join(names)]
        return command + self.rank_words()
