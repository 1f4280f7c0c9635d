"""pdsh: one program that reaches all hosts over ssh."""

import os

from deepspeed.launcher.constants import PDSH_LAUNCHER, PDSH_MAX_FAN_OUT
from deepspeed.launcher.runners.base import MultiNodeRunner, hosts_of, launch_words, working_folder
from deepspeed.launcher.words import join_words, quote


def _word(text):
    # pdsh replaces %h, %u and %n; the shell of the host reads the rest.
    return quote(text).replace("%", "%%")


class PDSHRunner(MultiNodeRunner):
    """``get_cmd`` returns three things: the command, a command that ends the job on all hosts, the environment."""

    name = PDSH_LAUNCHER
    program = "pdsh"
    uses_ssh = True
    package = "apt install pdsh, or take --launcher ssh, which needs ssh alone"

    def __init__(self, args, world_info_base64):
        super().__init__(args, world_info_base64)
        self.job_id = os.urandom(8).hex()  # identifies the processes of this job

    def parse_user_args(self):
        """The arguments of the script, quoted for pdsh and for the shell of the hosts."""
        return [_word(word) for word in self.args.user_args]

    def base_command(self, active_resources, environment):
        """pdsh with its options, up to the command for the hosts."""
        environment["PDSH_RCMD_TYPE"] = "ssh"
        if self.args.ssh_port is not None:
            environment["PDSH_SSH_ARGS_APPEND"] = (
                f"{environment.get('PDSH_SSH_ARGS_APPEND', '')} -p {self.args.ssh_port}".strip()
            )
        # -S: the largest exit code of the hosts is pdsh's own.
        command = ["pdsh", "-S", "-f", str(PDSH_MAX_FAN_OUT), "-w", hosts_of(active_resources)]
        return command + self.launcher_words()

    def agents_command(self, hosts, words, environment):
        """The command that starts an agent on each of ``hosts``, each with its own name."""
        line = " ".join([*map(_word, words), "--name", "%h"])
        return [*self.base_command(hosts, environment), f"exec {line}"]

    def get_cmd(self, environment, active_resources):
        """``(command, command that ends the job, environment)``."""
        command = self.base_command(active_resources, environment)
        before = [f"export {name}={_word(value)};" for name, value in self.exports.items()]
        before.append(f"cd {_word(working_folder())};")
        if self.args.venv_script:
            before.append(f". {_word(self.args.venv_script)};")
        launch = launch_words(self, "%n", f"--job_id={self.job_id}")  # %n: the number of a host in pdsh's list
        words = [word if word == "--node_rank=%n" else _word(word) for word in launch]
        end = ["pkill", "-TERM", "-f", f"[-]-job_id={self.job_id}"]
        start = [*command, *before, *words, _word(self.user_script), *self.user_arguments]
        return start, [*command, join_words(end)], environment
