"""The commands that each runner makes, what it refuses, and the programs that these commands start."""

import os
import shlex
import signal
import socket
import subprocess
import sys
from copy import deepcopy

import pytest

from deepspeed.host.mpi_ranks import ranks_of
from deepspeed.launcher import constants, launch, launcher_helper, multinode_runner, words
from deepspeed.launcher.resources import decode_world_info
from deepspeed.launcher.runner import encode_world_info, parse_args
from deepspeed.launcher.runners import RUNNERS
from processes import running, wait_for, write_program
from refusals import refused

HOSTS = {"worker-0": 4, "worker-1": 4}
WORLD = encode_world_info(HOSTS)
HELPER = [sys.executable, "-u", "-m", "deepspeed.launcher.launcher_helper", "--launcher"]
CLASSES = {name: RUNNERS.get(name) for name in RUNNERS.names()}


def made(kind, *line, hosts=HOSTS):
    args = parse_args([*line, "train.py", "--x", "a b"])
    pool = (hosts,) if kind.takes_pool else ()
    return kind(args, encode_world_info(hosts), *pool)


def command(kind, *line, hosts=HOSTS, exports=None):
    runner, environment = made(kind, *line, hosts=hosts), {"HOME": "/root"}
    for name, value in (exports or {}).items():
        runner.add_export(name, value)
    return runner.get_cmd(environment, hosts), environment


def test_names():
    assert {name: made(kind).name for name, kind in CLASSES.items()} == {name: name for name in CLASSES}
    assert all(issubclass(kind, multinode_runner.MultiNodeRunner) for kind in CLASSES.values())
    assert {constants.PDSH_LAUNCHER, constants.SLURM_LAUNCHER, constants.OPENMPI_LAUNCHER} < set(CLASSES)
    assert made(multinode_runner.PDSHRunner).user_script == "train.py"


def test_pdsh(monkeypatch):
    options = ["--launcher_args", "-t 5", "--master_port", "1", "--module"]
    (words_, end, environment), same = command(multinode_runner.PDSHRunner, *options, exports={"A": "it's 5%"})
    job = next(word for word in words_ if word.startswith("--job_id="))
    assert environment is same and environment["PDSH_RCMD_TYPE"] == "ssh"
    assert words_ == [
        "pdsh", "-S", "-f", "1024", "-w", "worker-0,worker-1", "-t", "5", "export A='it'\"'\"'s 5%%';",
        f"cd {os.getcwd()};", sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={WORLD}",
        "--node_rank=%n", "--master_addr=worker-0", "--master_port=1", "--module", job, "train.py", "--x", "'a b'",
    ]  # fmt: skip
    assert end[:8] == words_[:8] and end[8].startswith("pkill -TERM -f '[-]-job_id=") and job[9:] in end[8]
    # Another job of the same hosts is left alone.
    assert command(multinode_runner.PDSHRunner)[0][1][-1] != end[-1]


def test_ssh():
    line, _ = command(multinode_runner.SSHRunner, "--ssh_port", "77", exports={"A": "x y"})
    assert line[0] == "ssh" and line[line.index("-p") + 1] == "77" and line[-2] == "worker-0"
    assert shlex.split(line[-1])[-4:] == ["--master_addr=worker-0", "train.py", "--x", "a b"]


@pytest.mark.parametrize("dashes", ["-", "--"])
def test_openmpi(dashes):
    line, environment = command(multinode_runner.OpenMPIRunner, exports={"A": "secret"})
    assert line == [
        "mpirun", "-n", "8", "-hostfile", "/job/hostfile", "--mca", "btl", "^openib", "--mca", "btl_tcp_if_include",
        "eth0", "-x", "A", *HELPER, "openmpi", "--world_info", WORLD, "train.py", "--x", "a b",
    ]  # fmt: skip
    assert environment["A"] == "secret"
    line, _ = command(multinode_runner.OpenMPIRunner, "--launcher_arg", f"{dashes}mca btl_tcp_if_include eth1")
    assert "eth0" not in line and "eth1" in line


def test_mpich_impi_mvapich_slurm(tmp_path, monkeypatch):
    line, environment = command(multinode_runner.MPICHRunner, "--no_local_rank", exports={"A": "1", "B": "2"})
    assert line == [
        "mpirun", "-n", "8", "-ppn", "4", "-hosts", "worker-0,worker-1", "-genvlist", "A,B", *HELPER, "mpich",
        "--world_info", WORLD, "--no_local_rank", "train.py", "--x", "a b",
    ]  # fmt: skip
    uneven = command(multinode_runner.MPICHRunner, hosts={"a": 2, "b": [0]})[0]
    assert uneven[:5] == ["mpirun", "-n", "3", "-hosts", "a:2,b:1"]
    line, environment = command(multinode_runner.IMPIRunner, "--bind_cores_to_rank", "--bind_core_list", "0-7")
    assert line[:7] == ["mpirun", "-ppn", "4", "-genvlist", "I_MPI_PIN", "-hosts", "worker-0,worker-1"]
    assert line[7:9] == ["-n", "8"] and environment["I_MPI_PIN"] == "0" and "--bind_core_list=0-7" in line
    file = tmp_path / "hosts"
    monkeypatch.setattr("deepspeed.launcher.runners.mvapich.MVAPICH_TMP_HOSTFILE", str(file))
    line, environment = command(multinode_runner.MVAPICHRunner)
    assert line[:7] == ["mpirun", "-np", "8", "-ppn", "4", "--hostfile", str(file)]
    assert file.read_text() == "worker-0\nworker-1\n" and environment["MV2_SUPPORT_DL"] == "1"
    assert constants.MVAPICH_TMP_HOSTFILE == "/tmp/deepspeed_mvapich_hostfile"
    line, _ = command(multinode_runner.SlurmRunner, "-i", "worker-0", hosts={"worker-0": [0, 1]}, exports={"A": "1"})
    assert line == [
        "srun", "-n", "2", "--nodes", "1", "--nodelist", "worker-0", "--ntasks-per-node", "2", "--export", "ALL,A",
        sys.executable, "-u", "train.py", "--x", "a b",
    ]  # fmt: skip
    assert "--gpus" in command(multinode_runner.SlurmRunner, "--num_gpus", "4")[0]
    assert "--comment" in command(multinode_runner.SlurmRunner, "--slurm_comment", "mine")[0]


@pytest.mark.parametrize("name", ["openmpi", "mpich", "impi", "mvapich"])
def test_what_mpi_cannot_do(name):
    for line in (["-i", "worker-0"], ["-e", "worker-0:1"], ["--num_nodes", "1"], ["--num_gpus", "2"]):
        refused(ValueError, f"--launcher {name} does not support", made, CLASSES[name], *line)
    if name in ("impi", "mvapich"):
        refused(ValueError, "worker-0 4, worker-1 2", command, CLASSES[name], hosts={"worker-0": 4, "worker-1": 2})


def test_options_of_other_launchers_are_refused():
    for name, kind in CLASSES.items():
        if name not in ("ssh", "pdsh"):
            refused(ValueError, f"--ssh_port is for ssh and pdsh; --launcher {name}", made, kind, "--ssh_port", "22")
        if name != "slurm":
            refused(ValueError, f"--slurm_comment is for --launcher slurm.*{name}", made, kind, "--slurm_comment", "x")
        if kind.starts_ranks:
            refused(ValueError, "--log_rank_prefix.*option of its own", made, kind, "--log_rank_prefix")
        refused(ValueError, "not closed", made, kind, "--launcher_args", "a 'b")


def test_mpi_enters_a_virtual_environment():
    line, _ = command(multinode_runner.MPICHRunner, "--venv_script", "a b", "--enable_each_rank_log", "logs")
    start = line.index("bash")
    assert line[start : start + 6] == ["bash", "-c", '. "$0" && exec "$@"', "a b", "python", "-u"]
    assert "--enable_each_rank_log=logs" in line


def test_programs_that_are_missing_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, kind in CLASSES.items():
        runner = made(kind)
        assert runner.backend_exists() is False and f"--launcher {name} needs" in runner.why_not()
    write_program(tmp_path / "pdsh", "")
    assert made(CLASSES["pdsh"]).backend_exists() is True and made(CLASSES["pdsh"]).why_not() == ""


def test_the_mpirun_of_another_mpi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    open_mpi, hydra = "echo 'mpirun (Open MPI) 4.1.4'\n", "echo 'HYDRA build details:'\n"
    write_program(tmp_path / "mpirun", open_mpi)
    write_program(tmp_path / "mpiname", "echo MVAPICH2\n")
    assert made(CLASSES["openmpi"]).why_not() == "" and made(CLASSES["openmpi"]).program_here() == "mpirun"
    for name, maker in (("mpich", "MPICH"), ("impi", "Intel MPI"), ("mvapich", "MVAPICH2")):
        why = made(CLASSES[name]).why_not()
        assert f"--launcher {name} needs {maker}'s mpirun, and {tmp_path}/mpirun is that of another MPI" in why
    write_program(tmp_path / "mpirun.mpich", hydra)  # as Debian calls it where both are installed
    assert made(CLASSES["mpich"]).why_not() == "" and made(CLASSES["mpich"]).program_here() == "mpirun.mpich"
    write_program(tmp_path / "mpirun", hydra)
    assert made(CLASSES["mpich"]).program_here() == "mpirun"
    assert "needs Open MPI's mpirun" in made(CLASSES["openmpi"]).why_not()
    write_program(tmp_path / "mpirun.openmpi", open_mpi)
    assert made(CLASSES["openmpi"]).program_here() == "mpirun.openmpi"


def test_the_file_of_hosts_of_mvapich_goes_with_its_job(tmp_path, monkeypatch):
    file = tmp_path / "hosts"
    monkeypatch.setattr("deepspeed.launcher.runners.mvapich.MVAPICH_TMP_HOSTFILE", str(file))
    first, second = made(CLASSES["mvapich"]), made(CLASSES["mvapich"])
    first.tidy()
    first.get_cmd({}, HOSTS)
    os.utime(file, ns=(0, 0))  # as if another job had written it
    first.tidy()
    assert file.exists()
    second.get_cmd({}, HOSTS)
    second.tidy()
    assert not file.exists()


def test_a_runner_of_another_package():
    class Mine(multinode_runner.MultiNodeRunner):
        name = "mine"

        def get_cmd(self, environment, active_resources):
            return ["mine", *self.script_words(local_rank=0)]

    runner = Mine(parse_args(["--no_python", "prog", "x"]), WORLD)
    assert runner.get_cmd({}, HOSTS) == ["mine", "prog", "--local_rank=0", "x"]


# ---- words --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text", ["", "a  b", "-mca x 'y z'", '"a \\" $b" c\\ d', "--x='1 2'", "''", "a'b'\"c\"", '\\n "\\n"']
)
def test_words_are_split_as_a_shell_does(text):
    assert words.split_words(text) == shlex.split(text)


def test_quoting():
    for word in ["", "a", "it's", "$x `y` \\", "\n\t*", "ü", "%h"]:
        line = words.join_words(["x", word])
        assert shlex.split(line) == ["x", word] == words.split_words(line)
        said = subprocess.run(["sh", "-c", f"printf %s {words.quote(word)}"], capture_output=True, text=True).stdout
        assert said == word
    refused(ValueError, "not closed", words.split_words, "a 'b")


# ---- launch, launcher_helper --------------------------------------------------------------------------------------
def launch_plan(*line):
    return launch.plan_of(launch.parse_args([*line, "train.py", "--y"]))


def test_launch_starts_one_hosts_share(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (tmp_path / "train.py").write_text("")
    world = encode_world_info({"a": [0, 1], "b": [3], "c": 2})
    plan = launch_plan(f"--world_info={world}", "--node_rank=1", "--master_addr=a", "--master_port=5")
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT".split()
    assert [plan.environments[0][name] for name in names] == ["2", "0", "5", "1", "1", "3", "a", "5"]
    assert plan.commands == [[sys.executable, "-u", "train.py", "--local_rank=0", "--y"]]
    assert [env["RANK"] for env in launch_plan(f"--world_info={world}", "--node_rank=2").environments] == ["3", "4"]
    refused(ValueError, "encode_world_info", launch_plan, "--world_info=x")
    refused(ValueError, "3 host", launch_plan, f"--world_info={world}", "--node_rank=3")
    assert decode_world_info(world)["c"] == 2
    assert launch_plan(f"--world_info={world}", "--save_pid", "4711").save_pid == 4711
    assert launch.main(["--world_info", world, "--max_elastic_nodes", "2", "train.py"]) == 1
    line, _, _ = command(multinode_runner.PDSHRunner, "--save_pid")[0]
    told = line[line.index("deepspeed.launcher.launch") + 1 :]
    options = launch.parse_args([word.replace("%n", "1") for word in told])
    assert options.save_pid == os.getpid() and options.training_script == "train.py"
    capsys.readouterr()
    assert launcher_helper.main(["--world_info", "x", "t.py"]) == 1
    assert "error: --world_info 'x' is not what" in capsys.readouterr().err


PLACES = [
    ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
      "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (3, 4, 1, 2, 1, 2)),
    ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}, (1, 2, 0, 1, 1, 2)),
    ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "0",
      "MV2_COMM_WORLD_LOCAL_SIZE": "2"}, (0, 2, 0, 2, 0, 1)),
    ({"PALS_RANKID": "2", "PMI_SIZE": "4", "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "2"}, (2, 4, 0, 2, 1, 2)),
]  # fmt: skip


@pytest.mark.parametrize("environment, place", PLACES)
def test_the_place_that_mpi_says(environment, place):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert tuple(ranks_of(environment)[name] for name in names) == place


def test_the_place_on_hosts_of_different_sizes():
    found = ranks_of({"PMIX_RANK": "2"}, {"a": 2, "b": 1})
    assert found == dict(RANK=2, WORLD_SIZE=3, LOCAL_RANK=0, LOCAL_SIZE=1, CROSS_RANK=1, CROSS_SIZE=2)
    refused(ValueError, "start it by mpirun", ranks_of, {})
    refused(ValueError, "LOCAL_SIZE of rank 1", ranks_of, {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"})
    refused(ValueError, "rank 2 of 2", ranks_of, {**deepcopy(PLACES[1][0]), "PMI_RANK": "2"})


def test_slurms_word_on_what_started_mpi_is_not_that_on_the_rank():
    slurm = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
    refused(ValueError, "LOCAL_RANK and LOCAL_SIZE of rank 1", ranks_of, {"PMI_RANK": "1", "PMI_SIZE": "4", **slurm})
    by_srun = ranks_of({"PMIX_RANK": "1", **slurm, "SLURM_PROCID": "1"}, {"a": 1, "b": 1})  # srun --mpi=pmix
    assert by_srun == dict(RANK=1, WORLD_SIZE=2, LOCAL_RANK=0, LOCAL_SIZE=1, CROSS_RANK=1, CROSS_SIZE=2)


def test_the_helper_becomes_the_script(monkeypatch):
    environment = {**PLACES[0][0], "KMP_AFFINITY": "none"}
    line, variables, cores = launcher_helper.rank_command(launcher_helper.parse_args(["train.py", "-x"]), environment)
    assert line == [sys.executable, "-u", "train.py", "--local_rank=1", "-x"] and cores is None
    assert variables["RANK"] == "3" and variables["CROSS_SIZE"] == "2"
    refused(
        ValueError,
        "KMP_AFFINITY",
        launcher_helper.rank_command,
        launcher_helper.parse_args(["--bind_cores_to_rank", "t.py"]),
        environment,
    )
    usable = sorted(os.sched_getaffinity(0))
    bound = launcher_helper.parse_args(["--bind_cores_to_rank", "--bind_core_list", str(usable[0]), "t.py"])
    _, variables, cores = launcher_helper.rank_command(bound, PLACES[1][0])
    assert cores == usable[:1] and variables["OMP_NUM_THREADS"] == "1"


def helped(script, tmp_path, **options):
    """A rank as Hydra starts it: in a group of its own, with a descriptor on which it may ask for the job's end."""
    (tmp_path / "train.py").write_text(script)
    asked, told = os.pipe()
    line = [sys.executable, "-m", "deepspeed.launcher.launcher_helper", "train.py"]
    folders = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": folders, **PLACES[1][0], "PMI_FD": str(told)}
    rank = subprocess.Popen(
        line, cwd=tmp_path, env=environment, pass_fds=[told], start_new_session=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip
    os.close(told)
    return rank, asked


@pytest.mark.parametrize(
    "end, code, how",
    [("sys.exit(37)", 37, "failed with exit code 37"), ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL")],
)
def test_the_helper_says_which_rank_failed_and_asks_hydra_for_the_end(end, code, how, tmp_path):
    rank, asked = helped(f"import os, sys; print('last words', file=sys.stderr, flush=True); {end}", tmp_path)
    said = rank.communicate(timeout=60)[1]
    assert rank.returncode == code and os.read(asked, 1000) == b"cmd=abort exitcode=%d\n" % code
    os.close(asked)
    words_, report = said.splitlines()
    assert words_ == "last words"
    assert report.startswith("deepspeed: rank 1 of 2 (pid ") and f"host {socket.gethostname()}) {how}" in report


@pytest.mark.parametrize("sig, code", [(signal.SIGTERM, 143), (signal.SIGUSR1, 0)])
def test_a_rank_that_mpi_ends_has_not_failed(sig, code, tmp_path):
    """MPI signals the group of processes: the script gets it once, the helper ends nothing, and says nothing."""
    script = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
print("here", flush=True)
time.sleep(600)
"""
    rank, asked = helped(script, tmp_path)
    assert rank.stdout.readline() == "here\n"
    os.killpg(rank.pid, sig)
    assert rank.communicate(timeout=60)[1] == "" and rank.returncode == code
    assert os.read(asked, 1000) == b""
    os.close(asked)


def test_the_script_ends_with_its_helper(tmp_path):
    rank, asked = helped("import os, time; print(os.getpid(), flush=True); time.sleep(600)", tmp_path)
    script = int(rank.stdout.readline())
    rank.kill()
    wait_for(lambda: not running(script), 30)
    rank.communicate(timeout=60)
    os.close(asked)
