"""The library with NCCL's interface that tests use where there is no GPU: built from its source, and ordered about."""

import contextlib
import ctypes
import glob
import os
import shutil
import subprocess

import pytest

import devices
from deepspeed import _native

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SOURCE = os.path.join(ROOT, "tests", "cpp", "comm", "fake_nccl", "fake_nccl.cpp")
BUILT = {None: "libfake_nccl.so", "FAKE_NCCL_OLD": "libfake_nccl_old.so", "FAKE_NCCL_BROKEN": "libfake_nccl_broken.so"}


@contextlib.contextmanager
def on_the_standin(folders):
    """A context in which the stand-in device, where the tests run on it, has this library. ``folders``: pytest's
    ``tmp_path_factory``."""
    with pytest.MonkeyPatch.context() as patch:
        if devices.NAME == "standin":
            patch.setenv("DS_STANDIN_NCCL", build(folders.mktemp("nccl")))
        yield


def build(folder, name="libfake_nccl.so", define=None):
    """Its path in ``folder``. ``define``: FAKE_NCCL_OLD or FAKE_NCCL_BROKEN (fake_nccl.cpp says what they are). What
    the C++ tests have built is copied, unless a source has changed since."""
    path = os.path.join(str(folder), name)
    built = os.path.join(ROOT, "build", _native.tag(), "bin", BUILT[define])
    sources = glob.glob(os.path.join(os.path.dirname(SOURCE), "*"))
    if os.path.exists(built) and os.path.getmtime(built) > max(map(os.path.getmtime, sources)):
        return shutil.copy(built, path)
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler to build tests/cpp/comm/fake_nccl with")
    flags = ["-std=c++17", "-shared", "-fPIC", "-O0", *([f"-D{define}"] if define else [])]
    subprocess.run([*compiler.split(), *flags, "-o", path, SOURCE, "-lpthread"], check=True)
    return path


class Orders:
    """The functions ``fake_nccl_*`` of a library that this process has opened, or opens now."""

    def __init__(self, path):
        self._library = ctypes.CDLL(path)
        self._library.fake_nccl_count.restype = ctypes.c_int64
        self._library.fake_nccl_report.restype = ctypes.c_char_p

    def count(self, what):
        return self._library.fake_nccl_count(what.encode())

    def fail(self, function, result):
        self._library.fake_nccl_fail(function.encode(), result)

    def fail_later(self, result):
        self._library.fake_nccl_async_error(result)

    def report(self):
        """The queues of all ranks when the job ended; empty: it has not."""
        return self._library.fake_nccl_report().decode()

    def reset(self):
        self._library.fake_nccl_reset()
