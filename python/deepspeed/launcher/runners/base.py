"""The base class of all runners, which start agents or ranks on several hosts."""

import os
import subprocess
import sys
from abc import ABC, abstractmethod

from deepspeed.host.programs import find_program
from deepspeed.launcher.environment import script_command
from deepspeed.launcher.resources import counts_of, decode_world_info
from deepspeed.launcher.words import split_words


class MultiNodeRunner(ABC):
    """Makes the command that starts a job on the hosts of ``world_info_base64`` (``encode_world_info``).

    ``args``: the options of the program ``deepspeed``. ValueError for options that this runner does not know.
    """

    program = ""  # must be installed on the host where the job is started
    package = ""  # the package that contains the program
    uses_ssh = False
    takes_pool = False  # the constructor takes the hosts and their slots
    starts_ranks = False  # the program starts the ranks, without agents
    one_link_per_host = False  # the program links one agent to the head by stdin and stdout; else agents connect to it
    passes_environment = False  # the program gives the environment of the head to the agents
    reads_hostfile = False  # the program reads the hostfile

    def __init__(self, args, world_info_base64):
        self.args = args
        self.validate_args()
        self.user_arguments = self.parse_user_args()
        self.user_script = args.user_script
        self.world_info_base64 = world_info_base64
        self.exports = {}

    @property
    def name(self):
        """The runner's name for ``--launcher``."""
        return self.__class__.__name__

    @abstractmethod
    def get_cmd(self, environment, active_resources):
        """The command as a list of words.

        ``environment``: of the process that will run it; the exports are added to it. ``active_resources``:
        ``{host: slots}``, as numbers of slots or as lists of them.
        """

    def backend_exists(self):
        """Whether its program is installed here."""
        return find_program(self.program) is not None

    def add_export(self, key, var):
        """Sets ``key`` to ``var`` in the environment of the ranks."""
        self.exports[key.strip()] = str(var)

    def parse_user_args(self):
        """The arguments of the script, as arguments of the command."""
        return list(self.args.user_args)

    def validate_args(self):
        """Raises ValueError for options that this runner does not know."""
        split_words(self.args.launcher_args)
        if self.args.ssh_port is not None and not self.uses_ssh:
            raise ValueError(f"--ssh_port is for ssh and pdsh; --launcher {self.name} reaches hosts by itself.")
        if self.args.slurm_comment and self.program != "srun":
            raise ValueError(f"--slurm_comment is for --launcher slurm, and this is --launcher {self.name}.")

    def why_not(self):
        """An empty text if the runner can be used here, else a sentence that says what to install."""
        if self.backend_exists():
            return ""
        return f"--launcher {self.name} needs the program {self.program!r}, which is not installed ({self.package})."

    # ---- pieces of commands --------------------------------------------------------------------------------------
    def launcher_words(self):
        """``--launcher_args`` as a list of arguments."""
        return split_words(self.args.launcher_args)

    def script_words(self, local_rank=None):
        """The script and its arguments as a command that a rank may run; ``local_rank`` is handed to the script."""
        return script_command(self.args, local_rank, self.user_arguments)


class PoolRunner(MultiNodeRunner):
    """A runner whose constructor takes ``{host: slots}``."""

    takes_pool = True

    def __init__(self, args, world_info_base64, resource_pool):
        super().__init__(args, world_info_base64)
        self.resource_pool = resource_pool


class MPIRunner(PoolRunner):
    """MPI starts the ranks; each runs ``deepspeed.launcher.launcher_helper``, which runs the script.

    Values of exported variables are in the environment of mpirun; the command contains only their names.
    """

    program = "mpirun"
    starts_ranks = True
    maker = ""  # the name of the MPI that this mpirun belongs to
    others = ()  # words in the version text of another MPI's mpirun, which has other options
    debian = ""  # the name of the program on Debian if several MPIs are installed

    def program_here(self):
        """The program to start: ``mpirun``, Debian's name for it if ``mpirun`` belongs to another MPI, or None."""
        path = find_program(self.program)
        if path is not None:
            said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            if not any(other in said for other in self.others):
                return self.program
        return self.debian if self.debian and find_program(self.debian) else None

    def why_not(self):
        why = super().why_not()
        if not why and self.program_here() is None:
            why = (
                f"--launcher {self.name} needs {self.maker}'s mpirun, and {find_program(self.program)} is that of "
                f"another MPI: put {self.maker}'s first on PATH ({self.package}), or take the --launcher of that one."
            )
        return why

    def tidy(self):
        """Removes files that ``get_cmd`` has made; called after mpirun has ended."""

    def validate_args(self):
        super().validate_args()
        filters = {
            "--include": self.args.include,
            "--exclude": self.args.exclude,
            "--num_nodes and --num_gpus": self.args.num_nodes != -1 or self.args.num_gpus != -1,
        }
        for given in filter(filters.get, filters):
            raise ValueError(
                f"--launcher {self.name} does not support {given}: MPI reads the hosts itself. Write a hostfile "
                f"with the slots to use, and name it by --hostfile."
            )
        if self.args.log_rank_prefix:
            raise ValueError(
                f"--log_rank_prefix: with --launcher {self.name} the output goes through MPI, which has an option of "
                f"its own (Open MPI: --launcher_args=--tag-output; Hydra: --launcher_args=-prepend-rank)."
            )

    def counts(self):
        """``{host: ranks}``."""
        return counts_of(self.resource_pool)

    def equal_count(self):
        """The number of ranks of each host; ValueError if hosts differ."""
        counts = self.counts()
        if len(set(counts.values())) != 1:
            shown = ", ".join(f"{host} {count}" for host, count in counts.items())
            raise ValueError(
                f"--launcher {self.name} needs the same number of slots on every host, and these differ: {shown}. "
                f"Write equal numbers into the hostfile, or take --launcher openmpi or ssh."
            )
        return next(iter(counts.values()))

    def take_exports(self, environment):
        """Puts the exports into the environment of mpirun; returns Hydra's option that passes them on to the ranks."""
        environment.update(self.exports)
        return ["-genvlist", ",".join(self.exports)] if self.exports else []

    def rank_words(self):
        """The command that MPI starts for each rank."""
        args = self.args
        words = [*python_words(args), "-u", "-m", "deepspeed.launcher.launcher_helper", "--launcher", self.name]
        words += ["--world_info", self.world_info_base64]
        words += flag_words(args, "module", "no_python", "no_local_rank", "bind_cores_to_rank")
        words += flag_words(args, "bind_core_list", "enable_each_rank_log")
        return [*words, self.user_script, *self.user_arguments]


def flag_words(args, *names):
    """Those of the options ``names`` that are given, as arguments of another program of this package."""
    given = {name: getattr(args, name, None) for name in names}
    return [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in given.items()
        if value not in (None, False, "None", "")
    ]


def python_words(args):
    """The command for Python on a host: that of the virtual environment that is activated first, else this one."""
    if args.venv_script:
        return ["bash", "-c", '. "$0" && exec "$@"', args.venv_script, "python"]
    return [sys.executable or "python3"]


def hosts_of(active_resources):
    """The hosts as one argument: ``h1,h2``."""
    return ",".join(active_resources)


def launch_words(runner, node_rank, *more):
    """``python -m deepspeed.launcher.launch`` for one host, by the published flags and ``more``, up to the script."""
    args = runner.args
    words = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={runner.world_info_base64}"]
    first = next(iter(decode_world_info(runner.world_info_base64)))
    words += [f"--node_rank={node_rank}", f"--master_addr={args.master_addr or first}"]
    words += flag_words(args, "master_port") + ([f"--save_pid={os.getpid()}"] if args.save_pid else [])
    words += flag_words(args, "module", "no_python", "no_local_rank", "bind_cores_to_rank", "log_rank_prefix")
    return [*words, *flag_words(args, "enable_each_rank_log", "bind_core_list"), *more]


def working_folder():
    """The folder in which the job was started; agents change to it on every host."""
    return os.path.abspath(".")
