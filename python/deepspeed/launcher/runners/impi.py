"""Intel MPI's mpirun."""

from deepspeed.launcher.constants import IMPI_LAUNCHER
from deepspeed.launcher.runners.base import MPIRunner, hosts_of


class IMPIRunner(MPIRunner):
    """Every host has the same number of ranks. If cores are bound to ranks, MPI's own binding is off."""

    name = IMPI_LAUNCHER
    package = "install Intel MPI, and source its setvars.sh"
    maker, others = "Intel MPI", ("Open MPI", "Spectrum MPI")

    def get_cmd(self, environment, active_resources):
        if getattr(self.args, "bind_cores_to_rank", False):
            self.add_export("I_MPI_PIN", "0")
        count = self.equal_count()
        command = ["mpirun", "-ppn", str(count), *self.launcher_words(), *self.take_exports(environment)]
        command += ["-hosts", hosts_of(self.counts()), "-n", str(count * len(self.counts()))]
        return command + self.rank_words()
