"""From the command line to commands and environments, without starting anything."""

import socket
import sys
import types
from unittest import mock

import pytest

from deepspeed.host import cpu, devices, numa
from deepspeed.launcher import cluster, environment, plan, runner
from deepspeed.launcher.arguments import check, parse_args
from deepspeed.launcher.multinode_runner import OpenMPIRunner
from processes import run_python
from refusals import refused


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a script, no GPUs, no launcher variables and a free default port."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "train.py").write_text("print('hello')\n")
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "MASTER_PORT", "OMP_NUM_THREADS", "KMP_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "nvidia_device_count", lambda: 0)
    monkeypatch.setattr(plan.ports, "claim_port", lambda port: "claimed")
    return tmp_path


def plan_of(line):
    options = parse_args(line.split())
    check(options)
    return plan.make_plan(options)


def gpus(monkeypatch, count, visible=None):
    monkeypatch.setattr(devices, "nvidia_device_count", lambda: count)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def test_commands_and_environment():
    made = plan_of("--num_accelerators 2 train.py --epochs 3 --num_gpus 7")
    assert made.commands[1] == [sys.executable, "-u", "train.py", "--local_rank=1", "--epochs", "3", "--num_gpus", "7"]
    env = made.environments[1]
    expected = dict(
        RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", LOCAL_SIZE="2", CROSS_RANK="0", CROSS_SIZE="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
    )  # fmt: skip
    assert {name: env[name] for name in expected} == expected and "CUDA_VISIBLE_DEVICES" not in env


def test_ways_to_start_the_script():
    assert plan_of("--module --num_gpus 1 pkg.train x").commands == [
        [sys.executable, "-u", "-m", "pkg.train", "--local_rank=0", "x"]
    ]
    assert plan_of("--no_python --no_local_rank --num_gpus 1 true x").commands == [["true", "x"]]
    assert plan_of("--master_addr 10.0.0.7 --master_port 1234 train.py").environments[0]["MASTER_ADDR"] == "10.0.0.7"


@pytest.mark.parametrize(
    "line, named",
    [
        ("--num_nodes 1 -i localhost train.py", "--include"),
        ("-i localhost:0 -e localhost:1 no_such_script.py", "give one of them"),
        ("--num_gpus 1 -e localhost:0 train.py", "--exclude"),
        ("--num_gpus 0 train.py", "at least 1"),
        ("--module --no_python train.py", "exclude each other"),
        ("--bind_core_list 0-1 train.py", "--bind_cores_to_rank"),
        ("--master_port 70000 train.py", "70000"),
        ("--launcher telepathy train.py", "telepathy"),
        ("-i localhost -e localhost train.py", "exclude each other"),
        ("-i otherhost train.py", "otherhost"),
        ("--node_rank 1 train.py", "--no_ssh"),
        ("--ssh_port 0 train.py", "--ssh_port is 0"),
        ("--no_ssh --check", "which --no_ssh does not"),
        ("--insecure train.py", "--no_ssh"),
        ("--no_ssh --venv_script x train.py", "--venv_script"),
        ("--log_level loud train.py", "loud"),
        ("--join_timeout 0 train.py", "--join_timeout"),
    ],
)
def test_contradictions_are_value_errors(line, named):
    refused(ValueError, named, runner.main, args=line.split())


@pytest.mark.parametrize(
    "line, named",
    [
        ("--min_elastic_nodes 1", "--min_elastic_nodes is for .*add --elastic_training"),
        ("--elastic_training --max_elastic_nodes 0", "--max_elastic_nodes is 0; it must be at least 1"),
        ("--elastic_training --min_elastic_nodes 3 --max_elastic_nodes 2", "is 3, more than --max_elastic_nodes 2"),
        ("--elastic_training --num_gpus 1 --min_elastic_nodes 2", "is 2, and there is no hostfile /job/hostfile"),
        (
            "--elastic_training --launcher openmpi --hostfile {}",
            "--launcher openmpi does not: take --launcher ssh",
        ),
    ],
)
def test_numbers_of_hosts_that_may_change(line, named, tmp_path):
    (tmp_path / "hosts").write_text("h1.invalid slots=1\nh2.invalid slots=1\n")
    refused(
        (ValueError, runner.LaunchError),
        named,
        runner.main,
        args=[*line.format(tmp_path / "hosts").split(), "train.py"],
    )


@pytest.mark.parametrize(
    "line, kind, words",
    [
        ("run", ValueError, "autotuning needs the configuration among the arguments of the script"),
        ("run --no_python", runner.LaunchError, "'train.py' cannot be started"),
        ("run --elastic_training", ValueError, "--autotuning starts jobs of its own"),
    ],
)
def test_autotuning_names_what_is_missing(line, kind, words):
    refused(kind, words, runner.main, args=["--autotuning", *line.split(), "train.py"])


@pytest.mark.parametrize("how", ["tune", "run"])
@pytest.mark.parametrize("size", [[], ["--num_nodes", "1", "--num_gpus", "1"]])
def test_autotuning_hands_over_to_the_tuner(how, size, monkeypatch, tmp_path):
    autotuner = mock.Mock()
    (tmp_path / "hosts").write_text("h1.invalid slots=2\nh2.invalid slots=1\n")
    package = types.ModuleType("deepspeed.autotuning")
    package.autotuner = types.SimpleNamespace(Autotuner=autotuner)
    monkeypatch.setitem(sys.modules, "deepspeed.autotuning", package)
    monkeypatch.setitem(sys.modules, "deepspeed.autotuning.autotuner", package.autotuner)
    assert runner.main(["--autotuning", how, "-H", str(tmp_path / "hosts"), *size, "train.py", "-x"]) == 0
    args, hosts = autotuner.call_args.args
    assert (args.autotuning, args.user_script, args.user_args) == (how, "train.py", ["-x"])
    assert hosts == {"h1.invalid": [0, 1], "h2.invalid": [0]}
    steps = ["tune", "print_tuning_results", "run_after_tuning"]
    assert [call[0] for call in autotuner.return_value.mock_calls] == steps[: 2 if how == "tune" else 3]


def test_a_file_of_variables_that_is_not_there_is_named(monkeypatch, capfd):
    monkeypatch.setenv("DS_ENV_FILE", "nowhere.env")
    monkeypatch.setattr(environment, "ENVIRONMENT_FILE", "nowhere.env")
    refused(runner.LaunchError, "nowhere.py", runner.main, ["nowhere.py"])
    assert "DS_ENV_FILE names nowhere.env, which is neither in the home folder nor here" in capfd.readouterr().err


def test_missing_script_and_program():
    refused(runner.LaunchError, "nowhere.py.*does not exist", runner.main, args=["nowhere.py"])
    refused(runner.LaunchError, "no-such-program", runner.main, args=["--no_python", "no-such-program"])


# ---- how many -----------------------------------------------------------------------------------------------------
def test_gpus_decide_the_number_of_ranks(monkeypatch):
    gpus(monkeypatch, 4)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in plan_of("train.py").environments] == ["0,1,2,3"] * 4
    assert [env["CUDA_VISIBLE_DEVICES"] for env in plan_of("--num_gpus 2 train.py").environments] == ["0,1"] * 2
    assert plan_of("-i localhost:1,3 train.py").environments[0]["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert plan_of("-e localhost:0 train.py").environments[0]["CUDA_VISIBLE_DEVICES"] == "1,2,3"
    refused(runner.LaunchError, "5.*offers 4", plan_of, "--num_gpus 5 train.py")


def test_visible_devices_are_honoured(monkeypatch):
    gpus(monkeypatch, 8, "2,5,GPU-abc")
    assert plan_of("train.py").environments[2]["CUDA_VISIBLE_DEVICES"] == "2,5,GPU-abc"
    assert plan_of("--num_gpus 1 train.py").environments[0]["CUDA_VISIBLE_DEVICES"] == "2"
    made = plan_of("-i localhost:7 train.py")
    assert made.environments[0]["CUDA_VISIBLE_DEVICES"] == "7" and any("CUDA_VISIBLE" in note for note in made.notes)
    gpus(monkeypatch, 8, "")
    assert len(plan_of("train.py").commands) == numa.numa_node_count()  # all GPUs hidden: the CPU


def test_the_cpu_may_be_chosen_on_a_gpu_machine(monkeypatch):
    gpus(monkeypatch, 4)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    made = plan_of("--num_accelerators 6 train.py")
    assert len(made.commands) == 6 and "CUDA_VISIBLE_DEVICES" not in made.environments[0]


def test_other_accelerators_are_counted_by_the_user(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    made = plan_of("train.py")
    assert len(made.commands) == 1 and any("--num_accelerators" in note for note in made.notes)
    assert len(plan_of("--num_accelerators 3 train.py").commands) == 3


def test_grace(monkeypatch):
    assert plan_of("train.py").grace_s == plan.GRACE_S == 5.0
    monkeypatch.setenv("DS_LAUNCHER_GRACE_S", "20")
    assert plan_of("train.py").grace_s == 20
    monkeypatch.setenv("DS_LAUNCHER_GRACE_S", "soon")
    refused(ValueError, "DS_LAUNCHER_GRACE_S is 'soon'", plan_of, "train.py")


def test_memory_nodes_decide_on_a_cpu_machine(monkeypatch):
    monkeypatch.setattr(numa, "numa_node_count", lambda: 3)
    assert len(plan_of("train.py").commands) == 3


def test_hostfile_of_this_machine_and_of_others(here):
    (here / "mine").write_text(f"{socket.gethostname()} slots=3\n")
    (here / "two").write_text("localhost slots=2\nworker-9.invalid slots=2\n")
    assert len(plan_of("-H mine train.py").commands) == 3
    assert len(plan_of("-H mine --num_gpus 2 train.py").commands) == 2
    assert len(plan_of("-H two -i localhost:1 train.py").commands) == 1
    hosts_of = lambda line: runner.far_hosts(parse_args(line.split()), [])  # noqa: E731
    assert hosts_of("-H two train.py") == {"localhost": [0, 1], "worker-9.invalid": [0, 1]}
    assert hosts_of("-H two -e localhost train.py") == {"worker-9.invalid": [0, 1]}
    assert hosts_of("-H mine train.py") is hosts_of("-H two -i localhost:1 train.py") is None
    assert hosts_of("-H mine --force_multi train.py") == {socket.gethostname(): [0, 1, 2]}
    refused(
        runner.LaunchError, "--num_nodes is 3, but the hostfile two names 2", hosts_of, "-H two --num_nodes 3 train.py"
    )
    refused(runner.LaunchError, "there is no hostfile missing", hosts_of, "-H missing --num_nodes 2 train.py")
    (here / "bad").write_text("localhost\n")
    refused(ValueError, "bad.*line 1", plan_of, "-H bad train.py")
    assert any("missing" in note for note in plan_of("-H missing train.py").notes)


# ---- threads, cores, files ----------------------------------------------------------------------------------------
def test_hosts_without_slots(here):
    (here / "hosts").write_text("a slots=0\nb slots=0\n")
    refused(runner.LaunchError, "every host of the hostfile .*hosts has slots=0", plan_of, f"-H {here}/hosts train.py")
    (here / "hosts").write_text("a slots=0\nb slots=2\n")  # one that is left out for now
    assert plan.active_hosts(parse_args(["-H", f"{here}/hosts", "--num_gpus", "1", "train.py"]), []) == {"b": [0]}


def mpi_plan(hostfile):
    """The plan of Open MPI on this machine, and the variables that it hands on."""
    args = parse_args(["--launcher", "openmpi", "-H", hostfile, "train.py"])
    mpi = OpenMPIRunner(args, runner.encode_world_info({"localhost": 1}), {"localhost": 1})
    return cluster.mpi_plan(args, {"localhost": [0]}, mpi), mpi.exports


def test_openmpi_without_a_hostfile(here):
    words = f"openmpi reads the hostfile itself, and there is no {here}/none"
    refused(runner.LaunchError, words, mpi_plan, f"{here}/none")
    (here / "none").write_text("localhost slots=1")
    assert f"{here}/none" in mpi_plan(f"{here}/none")[0].commands[0]


def test_two_mpi_jobs_of_one_machine_meet_at_different_ports(here, monkeypatch):
    claimed = set()
    monkeypatch.setattr(
        plan.ports, "claim_port", lambda port: None if port in claimed else claimed.add(port) or "claimed"
    )
    (here / "hosts").write_text("localhost slots=1")
    (first, one), (second, two) = mpi_plan(f"{here}/hosts"), mpi_plan(f"{here}/hosts")
    assert first.port_claim is not None and second.port_claim is not None and one["MASTER_PORT"] != two["MASTER_PORT"]


def test_threads_are_shared_out_unless_chosen(monkeypatch):
    monkeypatch.setattr(environment, "usable_cores", lambda: list(range(12)))
    monkeypatch.setattr(environment, "physical_cores", lambda cores: cores)
    made = plan_of("--num_gpus 5 train.py")
    assert made.environments[0]["OMP_NUM_THREADS"] == "2"
    assert sum("OMP_NUM_THREADS" in note for note in made.notes) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    made = plan_of("--num_gpus 5 train.py")
    assert made.environments[0]["OMP_NUM_THREADS"] == "7" and not any("OMP" in note for note in made.notes)


def test_cores_are_bound_in_equal_shares(monkeypatch):
    monkeypatch.setattr(numa, "usable_cores", lambda: list(range(64)))
    monkeypatch.setattr(cpu, "thread_siblings", str)
    monkeypatch.setattr(numa, "numa_nodes", lambda: [])
    monkeypatch.setattr(environment, "physical_cores", lambda cores: cores)
    made = plan_of("--num_gpus 4 --bind_cores_to_rank --bind_core_list 0-27,32-59 train.py")
    assert [numa.format_range_list(cores) for cores in made.cores] == ["0-13", "14-27", "32-45", "46-59"]
    assert made.environments[3]["OMP_NUM_THREADS"] == "14"
    assert any("rank 1 14-27; rank 2 32-45" in note and "14 thread(s)" in note for note in made.notes)
    monkeypatch.setattr(numa, "numa_nodes", lambda: [(0, list(range(32))), (1, list(range(32, 64)))])
    made = plan_of("--num_gpus 4 --bind_cores_to_rank train.py")
    assert [nodes for nodes, _ in made.memory] == [[0], [0], [1], [1]] and made.commands[0][0] == sys.executable
    assert any("rank 3 48-63 (memory node 1)" in note for note in made.notes)
    monkeypatch.setattr(environment, "quota_cores", lambda: 10.0)
    assert plan_of("--num_gpus 4 --bind_cores_to_rank train.py").environments[0]["OMP_NUM_THREADS"] == "2"
    assert plan_of("--num_gpus 4 train.py").environments[0]["OMP_NUM_THREADS"] in ("1", "2")


def test_unknown_cpu_gets_avx512_blas(monkeypatch):
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    monkeypatch.setattr(environment, "openblas_coretype", lambda: "SkylakeX")
    assert plan_of("train.py").environments[0]["OPENBLAS_CORETYPE"] == "SkylakeX"
    monkeypatch.setattr(environment, "openblas_coretype", lambda: None)
    assert "OPENBLAS_CORETYPE" not in plan_of("train.py").environments[0]


def test_environment_files_reach_the_ranks(here, monkeypatch):
    (here / "home" / ".deepspeed_env").write_text("# mine\nA=home\nB=x=y\n\n")
    (here / ".deepspeed_env").write_text("A=here\n")
    monkeypatch.setenv("A", "shell")
    env = plan_of("train.py").environments[0]
    assert (env["A"], env["B"]) == ("here", "x=y")
    (here / ".deepspeed_env").write_text("no equals sign\n")
    refused(ValueError, "line 1.*no equals sign", plan_of, "train.py")
    monkeypatch.setattr(environment, "ENVIRONMENT_FILE", str(here / "other"))
    (here / "other").write_text("A=other\n")
    assert plan_of("train.py").environments[0]["A"] == "other"


def test_another_launchers_variables_do_not_reach_the_ranks(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert "TORCHELASTIC_USE_AGENT_STORE" not in plan_of("train.py").environments[0]


# ---- the port -----------------------------------------------------------------------------------------------------
def test_busy_port(monkeypatch):
    monkeypatch.setattr(plan.ports, "claim_port", lambda port: None if port in (29500, 4567) else "claimed")
    refused(runner.LaunchError, "port 29500.*--master_port", plan_of, "--master_port 29500 train.py")
    made = plan_of("train.py")
    port = made.environments[0]["MASTER_PORT"]
    assert port != "29500" and any(port in note and "29500" in note for note in made.notes)
    monkeypatch.setenv("MASTER_PORT", "4567")
    refused(runner.LaunchError, "port 4567.*MASTER_PORT", plan_of, "train.py")
    monkeypatch.setenv("MASTER_PORT", "x")
    refused(ValueError, "'x'", plan_of, "train.py")


def test_the_launcher_knows_no_torch():
    code = "import deepspeed.launcher.runner, sys; print([n for n in ('torch', 'numpy') if n in sys.modules])"
    asked = run_python(code)
    assert asked.stdout.strip() == "[]", asked.stderr
