"""One cluster of pretended hosts for all tests of this folder, and a folder that its hosts share for each of them."""

import importlib.util
import os
import pathlib
import sys
import tempfile

import pytest

import cluster_jobs
import pretended_hosts
import slurm_daemons
from sampling import every_case

SAMPLE = ("test_ranks_of_two_hosts_train[ssh]", "test_a_failing_rank_on_the_second_host[ssh]")
WHY_NOT = pretended_hosts.why_not()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == pathlib.Path(__file__).parent:
            item.add_marker(pytest.mark.dist)
            item.add_marker(pytest.mark.slow)
            if WHY_NOT:
                item.add_marker(pytest.mark.skip(reason=WHY_NOT))
            elif item.name not in SAMPLE and not every_case() and not os.environ.get("DS_TEST_CLUSTER"):
                item.add_marker(pytest.mark.skip(reason="not in the sample: make test-cluster runs it"))


@pytest.fixture(scope="session")
def cluster():
    with pretended_hosts.PretendedHosts() as made:
        yield made


@pytest.fixture(scope="session")
def slurm(cluster):
    """Slurm on the cluster: variables for its programs."""
    why = slurm_daemons.why_not()
    if why:
        pytest.skip(why)
    return slurm_daemons.SlurmDaemons(cluster)


@pytest.fixture
def launcher(request):
    """The parameter, with its programs installed and its daemons running."""
    why = cluster_jobs.why_not(request.param)
    if why:
        pytest.skip(why)
    if request.param == "slurm":
        request.getfixturevalue("monkeypatch").setenv("SLURM_CONF", request.getfixturevalue("slurm").conf)
    return request.param


@pytest.fixture
def system_python():
    """A Python that has torch and Debian's mpi4py."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip(f"{sys.executable} has no mpi4py")
    return sys.executable


@pytest.fixture(autouse=True)
def folder(cluster, monkeypatch):
    made = pathlib.Path(tempfile.mkdtemp(dir=cluster.folder))
    monkeypatch.chdir(made)
    (made / "hosts").write_text("h1 slots=2\nh2 slots=1\n")
    return made
