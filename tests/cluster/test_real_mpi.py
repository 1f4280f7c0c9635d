"""Scripts that mpirun starts on two hosts without our launcher, as Azure ML does: who they are, and where they meet."""

import shutil

import pytest

from cluster_jobs import INIT, PYTHON_DIR, ended, ends_clean, places, popen, variables

LINES = {
    "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--hostfile", "hosts", "-n", "3", "--mca", "btl", "tcp,self"],
    "mpich": ["mpirun.mpich", "-launcher", "ssh", "-hosts", "h1:2,h2:1", "-n", "3"],
}
NAMES = ("PYTHONPATH", "DS_ACCELERATOR", "GLOO_SOCKET_IFNAME", "AZUREML_EXPERIMENT_ID", "AZ_BATCH_MASTER_NODE")
WITHOUT_MPI4PY = """
import importlib.util as util
find = util.find_spec
util.find_spec = lambda name, *rest: None if name == "mpi4py" else find(name, *rest)
"""

SIGNS = """
import os, torch, deepspeed
rank, found = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0)), []
for backend in ("nccl", "mpi"):
    torch.manual_seed(0)
    params = {"lr": 0.01, "freeze_step": 2, "comm_backend_name": backend}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "OneBitAdam", "params": params}}
    engine = deepspeed.initialize(model=torch.nn.Linear(40, 40), config=config)[0]
    torch.manual_seed(rank)
    for _ in range(6):
        engine.backward(engine(torch.randn(2, 40)).square().sum())
        engine.step()
    found.append(torch.cat([p.detach().flatten() for p in engine.module.parameters()]))
os.write(1, ("signs %s %.9f\\n" % (torch.equal(*found), float(found[0].double().sum()))).encode())
"""


def mpirun(cluster, folder, mpi, *more, python, script=INIT, **env):
    if shutil.which(LINES[mpi][0]) is None:
        pytest.skip(f"{LINES[mpi][0]} not installed: tools/packages.sh cluster")
    (folder / "init.py").write_text(script)
    env = variables(**env)
    exported = [word for name in NAMES if name in env and mpi == "openmpi" for word in ("-x", name)]
    return ended(popen(cluster.on_head(*LINES[mpi], *exported, *more, python, "init.py"), env))


def test_ranks_ask_mpi4py(cluster, folder, system_python):
    code, out, errors = mpirun(cluster, folder, "openmpi", python=system_python)
    assert code == 0, errors
    assert places(out) == [["h1", "0", "0", "3", "h1"], ["h1", "1", "1", "3", "h1"], ["h2", "2", "0", "3", "h1"]]
    ends_clean(cluster)


def test_signs_travel_by_mpi4py(cluster, folder, system_python):
    code, out, errors = mpirun(cluster, folder, "openmpi", python=system_python, script=SIGNS)
    assert code == 0, errors
    said = [line for line in out.splitlines() if line.startswith("signs")]
    assert len(said) == 3 and len(set(said)) == 1 and said[0].startswith("signs True"), out
    ends_clean(cluster)


def test_azure_ml_says_where_ranks_meet(cluster, folder, system_python):
    more = {"AZUREML_EXPERIMENT_ID": "e", "AZ_BATCH_MASTER_NODE": "h1:29477"}
    code, out, errors = mpirun(cluster, folder, "openmpi", python=system_python, **more)
    assert code == 0 and places(out)[2] == ["h2", "2", "0", "3", "h1"], errors


def test_without_mpi4py_an_address_is_asked_for(cluster, folder, system_python):
    (folder / "sitecustomize.py").write_text(WITHOUT_MPI4PY)
    paths = f"{folder}:{PYTHON_DIR}"
    two = ["-n", "2", "--map-by", "ppr:1:node"]  # the last -n counts
    code, _, errors = mpirun(cluster, folder, "openmpi", *two, python=system_python, PYTHONPATH=paths)
    assert code == 1 and "mpirun -x MASTER_ADDR=<address>" in errors and "it is not installed" in errors
    two += ["-x", "MASTER_ADDR=h1"]
    code, out, errors = mpirun(cluster, folder, "openmpi", *two, python=system_python, PYTHONPATH=paths)
    assert code == 0 and places(out) == [["h1", "0", "0", "2", "h1"], ["h2", "1", "0", "2", "h1"]], errors


def test_mpi4py_of_another_mpi_is_not_believed(cluster, folder, system_python):
    """Debian's is Open MPI's: under MPICH it takes each process for a job of its own."""
    code, _, errors = mpirun(cluster, folder, "mpich", python=system_python)
    assert code == 1 and "belongs to another MPI" in errors and "-genv MASTER_ADDR" in errors
    code, out, errors = mpirun(cluster, folder, "mpich", "-genv", "MASTER_ADDR", "h1", python=system_python)
    assert code == 0, errors
    assert places(out) == [["h1", "0", "0", "3", "h1"], ["h1", "1", "1", "3", "h1"], ["h2", "2", "0", "3", "h1"]]
