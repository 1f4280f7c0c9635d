"""For every test: the package of this tree comes first, and the helpers of other folders can be imported."""

import contextlib
import gc
import os
import sys

import pytest

TESTS = os.path.dirname(os.path.abspath(__file__))
for folder in (  # the last one comes first where two have a file of one name
    TESTS,
    os.path.join(TESTS, "python", "activation_checkpointing"),
    os.path.join(TESTS, "cluster"),
    os.path.join(TESTS, "device"),
    os.path.join(TESTS, "dist"),
    os.path.join(TESTS, "house"),
    os.path.join(TESTS, "python", "ops"),
    os.path.join(TESTS, "python", "autotuning"),
    os.path.join(TESTS, "python", "checkpoint"),
    os.path.join(TESTS, "python", "launcher"),
    os.path.join(os.path.dirname(TESTS), "python"),
):
    if folder not in sys.path:
        sys.path.insert(0, folder)

import devices  # noqa: E402  (the path above makes it importable)
import harness  # noqa: E402  (the path above makes it importable)
import sampling  # noqa: E402

# Folders whose tests see no torch: rooms of the first row of docs/architecture.md, and rules about files.
WITHOUT_TORCH = ("house", "cluster", "python/env_report", "python/host", "python/launcher", "python/nvme")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    harness.shutdown()


def pytest_ignore_collect(collection_path, config):
    """`tools/test.sh second` leaves out tests that have passed with another torch and see none."""
    if sampling.second_torch() and not any("::" in argument for argument in config.args):
        folder = os.path.relpath(str(collection_path), TESTS)
        return folder in WITHOUT_TORCH or None


def pytest_configure(config):
    """tools/test.sh names a file in which each test leaves its seconds. With pytest-xdist the first process writes."""
    # Every group of torch 2 asks the name server for its own address' name, and waits 5 s where the answer is lost.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    devices.select()
    path = os.environ.get("DS_TEST_TIMES")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Times(path))


def pytest_collection_finish():
    """Objects of thousands of tests stay to the end: a collection that walks through all of them takes 0.3 s."""
    gc.collect()
    gc.freeze()


class Times:
    """Adds a line for each test to a file: seconds of its set-up, body and clean-up, a tab, its name."""

    def __init__(self, path):
        self.path = path
        self.seconds = {}

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self):
        with open(self.path, "a", encoding="utf-8") as file:
            file.writelines(f"{seconds:.3f}\t{name}\n" for name, seconds in self.seconds.items())


# The files whose tests take longest come first: at the end of a run with several processes only one of them would work.
LONGEST = (
    "python/tools/test_make.py",
    "dist/test_front_door.py",
    "dist/test_quickstart.py",
    "python/test_docs.py",
    "python/op_builder/test_jit.py",
    "python/checkpoint/test_zero_to_fp32.py",
    "python/checkpoint/test_universal_convert.py",
    "python/sequence/test_lengths.py",
    "python/launcher/test_several_hosts.py",
)
COLLECTED = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Everything in tests/dist starts several processes: `make test-unit` leaves it out. Large matrices are sampled."""
    config.stash[COLLECTED] = [item.nodeid for item in items]
    order = {os.path.join(TESTS, path): place for place, path in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(str(item.path), len(order)))
    for item in items:
        if os.path.dirname(str(item.path)) == os.path.join(TESTS, "dist"):
            item.add_marker(pytest.mark.dist)
    if sampling.every_case():
        return
    for item in items:
        mark = item.get_closest_marker("every")
        if mark is not None and not any("::" in argument for argument in config.args):
            item.add_marker(pytest.mark.skip(reason=f"{mark.args[0]}: make test-all runs it"))
    if any("[" in argument for argument in config.args):
        return
    dropped = set(sampling.left_out(items))
    if not any("::" in argument for argument in config.args):
        dropped.update(item for item in items if sampling.only_on_first_torch(str(item.path), item.nodeid))
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]


@pytest.fixture
def folder(tmp_path):
    """The path of the test's own folder as a string, as functions of a script get it."""
    return str(tmp_path)


@pytest.fixture(autouse=True)
def checked_device(request):
    """The work of a test for any device in this process is checked like that of ranks."""
    with devices.checked() if request.node.get_closest_marker("any_device") else contextlib.nullcontext():
        yield


@pytest.fixture(scope="module", autouse=True)
def no_job_is_left():
    """A file whose tests start a job of one rank here leaves neither its process group nor its variables to others."""
    before = dict(os.environ)
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        (sys.modules.get("deepspeed.comm") or torch.distributed).destroy_process_group()
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def collected(request):
    """The names of all cases that this run of pytest has found, also of those that it leaves out; None where the
    command line names files."""
    config = request.config
    named = [os.path.abspath(argument) for argument in config.args]
    whole = named == [str(config.rootpath / path) for path in config.getini("testpaths")]
    return config.stash[COLLECTED] if whole else None
