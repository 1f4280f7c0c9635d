"""Where rank, size and meeting point come from: one process, environments of every kind."""

import os
import sys
from datetime import timedelta
from unittest import mock

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.comm import rendezvous
from deepspeed.comm.reduce_op import to_torch
from processes import run_python
from refusals import refused

FIVE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def bare():
    """An environment that no launcher touched, restored afterwards."""
    prefixes = ("OMPI_", "PMI_", "PMIX_", "PALS_", "MPI_LOCAL", "MV2_", "SLURM_", "AZ", "SM_", "DLTS_", "TORCHELASTIC")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(prefixes) and k not in (*FIVE, "LOCAL_SIZE")}
    with mock.patch.dict(os.environ, kept, clear=True):
        yield


@pytest.fixture
def no_mpi4py(monkeypatch):
    monkeypatch.setattr(rendezvous, "_mpi4py_installed", lambda: False)


def prepared(**arguments):
    rendezvous.prepare_environment(
        **{**dict(auto_mpi_discovery=True, distributed_port=29500, verbose=False), **arguments}
    )
    return {name: os.environ.get(name) for name in FIVE}


def test_a_process_on_its_own():
    found = prepared()
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["MASTER_ADDR"]) == (
        "0",
        "1",
        "0",
        "127.0.0.1",
    )
    assert 1024 < int(found["MASTER_PORT"]) < 65536


AZURE = {"AZUREML_EXPERIMENT_ID": "x", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}


def told(rank, local_rank, world, address, port):
    return dict(zip(FIVE, map(str, (rank, local_rank, world, address, port))))


def open_mpi(rank, size, local_rank, local_size):
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in zip(names, (rank, size, local_rank, local_size))}


@pytest.mark.parametrize(
    "environment, found",
    [
        (  # the word of a launcher is kept
            {**told(3, 1, 4, "10.1.1.1", 777), "OMPI_COMM_WORLD_SIZE": "99", "OMPI_COMM_WORLD_RANK": "98"},
            told(3, 1, 4, "10.1.1.1", 777),
        ),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1", "SLURM_LOCALID": "1"},
            {"LOCAL_RANK": "1"},
        ),
        ({**AZURE, **open_mpi(2, 4, 0, 2)}, told(2, 0, 4, "10.0.0.4", 6000)),
        (
            {"SM_TRAINING_ENV": "{}", **open_mpi(1, 2, 1, 2), "MASTER_ADDR": "algo-1", "MASTER_PORT": "7777"},
            told(1, 1, 2, "algo-1", 7777),
        ),
        # The script of sbatch is a process on its own.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-4]"}, {"WORLD_SIZE": "1"}),
    ],
)
def test_the_environment_of_a_launcher(environment, found):
    os.environ.update(environment)
    assert dist.in_aml() == ("AZUREML_EXPERIMENT_ID" in environment) and not dist.in_dlts()
    assert dist.in_aws_sm() == ("SM_TRAINING_ENV" in environment)
    assert found.items() <= prepared().items()


def test_what_is_missing_is_named():
    os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_ADDR="10.1.1.1")
    refused(RuntimeError, "MASTER_PORT is not", prepared)


def hydra(rank=1, size=2, local_rank=1, local_size=2):
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return dict(zip(names, map(str, (rank, size, local_rank, local_size))))


@pytest.mark.parametrize("environment", [open_mpi(1, 2, 1, 2), hydra()], ids=["Open MPI", "Hydra"])
def test_one_node_without_mpi4py(environment, no_mpi4py):
    os.environ.update(environment)
    assert prepared(distributed_port=4321) == told(1, 1, 2, "127.0.0.1", 4321)


def test_open_mpi_on_several_nodes_needs_an_address(no_mpi4py):
    os.environ.update(open_mpi(1, 4, 1, 2))
    refused(RuntimeError, "mpi4py.*MASTER_ADDR", prepared)
    os.environ["MASTER_ADDR"] = "10.0.0.1"
    assert prepared()["MASTER_ADDR"] == "10.0.0.1"


def test_another_mpi_needs_mpi4py(no_mpi4py):
    os.environ["PMI_SIZE"] = "2"
    refused(RuntimeError, "mpi4py", prepared)
    assert prepared(auto_mpi_discovery=False)["WORLD_SIZE"] == "1"


def test_srun_started_hydras_proxies(monkeypatch):
    """Slurm's variables are those of the proxy, one for each node, and mpi4py is not asked: Open MPI's would abort."""
    monkeypatch.setattr(rendezvous, "_from_mpi4py", lambda port: pytest.fail("asked"))
    monkeypatch.setattr(rendezvous, "_mpi4py_installed", lambda: True)
    step = dict(SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NODELIST="n[3-4]", SLURM_JOB_ID="77", SLURM_STEP_ID="2")
    os.environ.update(hydra(3, 4, 1, 2), SLURM_PROCID="1", SLURM_LOCALID="0", SLURM_NTASKS="2", **step)
    found = prepared()
    assert found == told(3, 1, 4, "n3", found["MASTER_PORT"]) and 20000 <= int(found["MASTER_PORT"]) < 32000


def test_azure_ml_with_another_mpi_and_without_a_first_node():
    os.environ.update(hydra(2, 4, 0, 2), AZUREML_EXPERIMENT_ID="x")
    refused(RuntimeError, "AZ_BATCH_MASTER_NODE does not say.*MASTER_ADDR", prepared)
    os.environ.update(AZURE)
    assert prepared() == told(2, 0, 4, "10.0.0.4", 6000)


FAKE_MPI = """
import os
COMM_TYPE_SHARED = "shared"
def Get_processor_name(): return "node7"
class Comm:
    def __init__(self, rank, size): self.rank, self.size = rank, size
    def Get_rank(self): return self.rank
    def Get_size(self): return self.size
    def Split_type(self, kind):
        assert kind == COMM_TYPE_SHARED
        return Comm(int(os.environ["FAKE_LOCAL_RANK"]), int(os.environ["FAKE_LOCAL_SIZE"]))
    def bcast(self, value, root):
        assert root == 0 and (value is None) == (self.rank != 0)
        return value if self.rank == 0 else ("node7", "4567")
COMM_WORLD = Comm(int(os.environ["FAKE_RANK"]), int(os.environ["FAKE_SIZE"]))
"""


@pytest.fixture
def fake_mpi(tmp_path, monkeypatch):
    """A package mpi4py whose ranks come from FAKE_*."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    (tmp_path / "mpi4py" / "MPI.py").write_text(FAKE_MPI)
    monkeypatch.syspath_prepend(str(tmp_path))

    def forget():
        for name in ("mpi4py", "mpi4py.MPI"):
            sys.modules.pop(name, None)

    def start(rank, size, local_rank, local_size):
        forget()
        os.environ.update(PMI_SIZE=str(size), FAKE_RANK=str(rank), FAKE_SIZE=str(size))
        os.environ.update(FAKE_LOCAL_RANK=str(local_rank), FAKE_LOCAL_SIZE=str(local_size))

    yield start
    forget()


def test_mpi4py_on_one_node_finds_a_free_port(fake_mpi):
    fake_mpi(0, 2, 0, 2)
    found = prepared()
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("0", "2", "127.0.0.1")
    assert found["MASTER_PORT"] != "29500" and os.environ["LOCAL_SIZE"] == "2"


def test_mpi4py_on_several_nodes(fake_mpi):
    fake_mpi(0, 4, 0, 2)
    assert prepared(distributed_port=4567)["MASTER_ADDR"] == "node7"
    for name in FIVE:
        del os.environ[name]
    fake_mpi(3, 4, 1, 2)
    assert prepared() == dict(RANK="3", LOCAL_RANK="1", WORLD_SIZE="4", MASTER_ADDR="node7", MASTER_PORT="4567")


def test_mpi4py_of_another_mpi(fake_mpi):
    """It takes each process for a job of its own: rank 0 of 1, four times."""
    fake_mpi(0, 1, 0, 1)
    os.environ.update(hydra(3, 4, 1, 2))
    refused(RuntimeError, "belongs to another MPI.*MASTER_ADDR", prepared)
    os.environ["MASTER_ADDR"] = "node1"
    assert prepared() == told(3, 1, 4, "node1", 29500)


def test_mpi_discovery_keeps_the_users_meeting_point(fake_mpi):
    fake_mpi(1, 2, 1, 2)
    os.environ.update(MASTER_ADDR="10.9.9.9", MASTER_PORT="1111")
    dist.mpi_discovery(verbose=False)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.environ["RANK"]) == ("10.9.9.9", "1111", "1")


# ---- SLURM --------------------------------------------------------------------------------------------------------
def test_srun():
    os.environ.update(
        SLURM_PROCID="5", SLURM_STEP_NUM_TASKS="8", SLURM_LOCALID="1", SLURM_JOB_ID="77", SLURM_STEP_ID="2",
        SLURM_STEP_NODELIST="gpu[003-004],login1", PMI_SIZE="8",
    )  # fmt: skip
    found = prepared()
    port = found["MASTER_PORT"]
    assert found == told(5, 1, 8, "gpu003", port) and 20000 <= int(port) < 32000
    for name in FIVE:
        del os.environ[name]
    os.environ.update(SLURM_JOB_ID="78", MASTER_ADDR="10.0.0.9")
    assert prepared()["MASTER_PORT"] != port and os.environ["MASTER_ADDR"] == "10.0.0.9"


def test_srun_without_nodes_and_with_a_port():
    os.environ.update(SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="2")
    refused(RuntimeError, "MASTER_ADDR", prepared)
    os.environ["SLURM_JOB_NODELIST"] = "n1,n2"
    assert prepared(distributed_port=4444)["MASTER_PORT"] == "4444"


@pytest.mark.parametrize(
    "nodes, first",
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[003-007,9],x", "gpu003"), ("a[1,5]-ib", "a1-ib"), ("r-1[07]", "r-107")],
)
def test_the_first_node(nodes, first):
    assert rendezvous.first_node(nodes) == first


def test_launcher_getters():
    getters = (
        dist.get_world_rank_from_launcher, dist.get_local_rank_from_launcher, dist.get_world_size_from_launcher,
    )  # fmt: skip
    assert [ask() for ask in getters] == [0, 0, 1]
    os.environ.update(RANK="5", LOCAL_RANK="2", WORLD_SIZE="8")
    assert [ask() for ask in getters] == [5, 2, 8]
    os.environ["RANK"] = "five"
    refused(ValueError, "RANK is 'five'", dist.get_world_rank_from_launcher)


# ---- refusals -----------------------------------------------------------------------------------------------------
def test_init_distributed_refuses():
    refused(RuntimeError, "dist_init_required is False", dist.init_distributed, dist_init_required=False)
    refused(TypeError, "timedelta", dist.init_distributed, timeout=30)
    refused(ValueError, "verbos", dist.init_distributed, config={"comms_logger": {"verbos": True}})
    if not torch.cuda.is_available():
        refused(RuntimeError, "'nccl'.*gloo", dist.init_distributed, dist_backend="nccl")
    refused(RuntimeError, "oneccl_bindings_for_pytorch", dist.init_distributed, dist_backend="ccl")
    assert not dist.is_initialized()


def test_timeout_in_minutes():
    code = "from deepspeed.constants import default_pg_timeout as t; print(t.total_seconds())"
    assert run_python(code, DEEPSPEED_TIMEOUT="45").stdout.strip() == "2700.0"
    for bad in ("soon", "-1"):
        asked = run_python(code, DEEPSPEED_TIMEOUT=bad)
        assert asked.returncode != 0 and f"DEEPSPEED_TIMEOUT is '{bad}'" in asked.stderr
    assert isinstance(dist.default_pg_timeout, timedelta)


def test_reduce_ops():
    assert [op.value for op in dist.ReduceOp] == list(range(9)) and dist.ReduceOp.AVG.value == 7
    assert to_torch(dist.ReduceOp.MAX) == torch.distributed.ReduceOp.MAX
    assert to_torch(torch.distributed.ReduceOp.MIN) == torch.distributed.ReduceOp.MIN


def test_names_of_torch_distributed_are_there_too():
    assert dist.GroupMember is torch.distributed.GroupMember
    with pytest.raises(AttributeError):
        dist.no_such_function  # noqa: B018


def test_the_log_of_operations_is_honest(capsys):
    dist.configure(enabled=False)
    dist.configure(deepspeed_config={"comms_logger": {"enabled": False}})
    assert dist.log_summary(return_dict=True) == {} and dist.log_summary() is None
    assert "comms_logger was not enabled" in capsys.readouterr().out
    assert not dist.has_comm_data() and dist.get_comm_operation_count() == 0
