"""Slurm's srun."""

from deepspeed.launcher.constants import SLURM_LAUNCHER
from deepspeed.launcher.resources import counts_of
from deepspeed.launcher.runners.base import PoolRunner, hosts_of


class SlurmRunner(PoolRunner):
    """srun starts each rank as a task; ranks take their number from Slurm's variables."""

    name = SLURM_LAUNCHER
    program = "srun"
    package = "apt install slurm-client"
    passes_environment = True

    def base_command(self, active_resources, tasks):
        """srun with its options, without the command of the tasks. --include becomes a list of nodes."""
        command = ["srun", "-n", str(tasks)]
        if self.args.slurm_comment:
            command += ["--comment", self.args.slurm_comment]
        command += ["--nodes", str(len(active_resources)), "--nodelist", hosts_of(active_resources)]
        return command + self.launcher_words()

    def agent_command(self, host, words):
        """The command that starts an agent on ``host``, over stdin and stdout."""
        return [*self.base_command([host], 1), *words]

    def agents_command(self, hosts, words, environment):
        """The command that starts an agent on each of ``hosts``, which find their names in Slurm's variables."""
        return [*self.base_command(hosts, len(hosts)), "--ntasks-per-node", "1", "--export", "ALL", *words]

    def get_cmd(self, environment, active_resources):
        counts = list(counts_of(active_resources).values())
        command = self.base_command(active_resources, sum(counts))
        if len(set(counts)) == 1:
            command += ["--ntasks-per-node", str(counts[0])]
        if self.args.num_gpus > 0:
            command += ["--gpus", str(self.args.num_gpus * len(counts))]
        environment.update(self.exports)
        return command + ["--export", ",".join(["ALL", *self.exports]), *self.script_words()]
