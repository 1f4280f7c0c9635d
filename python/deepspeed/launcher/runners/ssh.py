"""ssh alone: one connection per host for messages and output."""

from deepspeed.launcher.constants import SSH_LAUNCHER
from deepspeed.launcher.runners.base import MultiNodeRunner, launch_words, working_folder
from deepspeed.launcher.words import join_words, quote


class SSHRunner(MultiNodeRunner):
    """``get_cmd`` is the command for the first host; ``host_cmd`` that for any."""

    name = SSH_LAUNCHER
    program = "ssh"
    uses_ssh = True
    package = "apt install openssh-client"
    one_link_per_host = True

    def base_command(self, host):
        """ssh with its options and the host: it never asks questions, and ends if the host is lost."""
        command = ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2", "-T"]
        if self.args.ssh_port is not None:
            command += ["-p", str(self.args.ssh_port)]
        return command + self.launcher_words() + [host]

    def host_cmd(self, host, node_rank):
        """The command that starts the ranks of one host."""
        before = "".join(f"export {name}={quote(value)}; " for name, value in self.exports.items())
        launch = launch_words(self, node_rank) + [self.user_script, *self.user_arguments]
        return self.base_command(host) + [f"{before}cd {quote(working_folder())}; {join_words(launch)}"]

    def agent_command(self, host, words):
        """The command that starts an agent on ``host``."""
        return [*self.base_command(host), f"exec {join_words(words)}"]

    def get_cmd(self, environment, active_resources):
        return self.host_cmd(next(iter(active_resources)), 0)
