"""ds_report: what it shows, and that nothing that is missing makes it fail."""

import os
import subprocess
import sys

import pytest

from deepspeed import env_report
from deepspeed.env_report import native, report
from deepspeed.ops.op_table import OPS
from deepspeed.version import __version__

PYTHON_DIR = os.path.dirname(os.path.dirname(report.__file__)).rsplit("/deepspeed", 1)[0]


def run(*args, **env):
    env = dict(os.environ, PYTHONPATH=PYTHON_DIR, **env)
    line = [sys.executable, "-m", "deepspeed.env_report", *args]
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_program():
    done = run()
    assert done.returncode == 0, done.stderr
    for name, *_ in OPS:
        assert sum(line.split()[:1] == [name] for line in done.stdout.splitlines()) == 1
    for label in (
        "torch ",
        "Python",
        "BLAS in use",
        "compiler",
        "cores",
        "shared memory",
        "instruction set",
        __version__,
    ):
        assert label in done.stdout, label
    quiet = run("--hide_operator_status", "--hide_errors_and_warnings").stdout
    assert "cpu_adam" not in quiet and "[WARNING]" not in quiet and "Python" in quiet


@pytest.mark.slow
def test_without_torch_and_without_path(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch')\n")
    env = dict(os.environ, PYTHONPATH=f"{tmp_path}{os.pathsep}{PYTHON_DIR}", PATH="")
    done = subprocess.run([sys.executable, "-m", "deepspeed.env_report"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "not usable: ImportError: there is no torch" in done.stdout
    assert "[WARNING] torch cannot be imported" in done.stdout and "apt install python3-torch" in done.stdout


def test_a_torch_that_crashes(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("import os; os._exit(77)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{PYTHON_DIR}")
    assert "exit code 77" in report.torch_facts()["error"]


FACTS = dict(
    version="2.0", folder="/t", cuda=None, backends=["gloo"], blas=("reference", "/usr/lib/blas/libblas.so.3"),
    blas_warning="torch's products run on the reference BLAS", mkldnn=True, native="_C.so", gpus=[],
)  # fmt: skip


def test_function_and_its_switches(monkeypatch, capsys):
    monkeypatch.setattr(report, "torch_facts", lambda: FACTS)
    env_report.main()
    text = capsys.readouterr().out
    assert "[WARNING] torch's products run on the reference BLAS" in text and "cpu_adam" in text
    env_report.main(hide_operator_status=True, hide_errors_and_warnings=True)
    text = capsys.readouterr().out
    assert "reference (/usr/lib/blas/libblas.so.3)" in text and "WARNING" not in text and "cpu_adam" not in text


def test_op_status(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "LIB_DIR", str(tmp_path))
    status = native.op_status(OPS[0], lambda device: "")
    assert (status.installed, status.compatible) == (False, True) and "run `make`" in status.why_not
    (tmp_path / "libds_kernels_cpu.so").write_text("no library")
    status = native.op_status(OPS[0], lambda device: "")
    assert not status.installed and "cannot be used" in status.why_not
    status = native.op_status(("fused_adam", "libds_kernels_cuda.so", "cuda", ""), lambda device: "no GPU")
    assert not status.compatible and "nvcc" in status.why_not and "no GPU" in status.why_not


def test_built_kernels_are_recognised():
    if not os.path.exists(os.path.join(native.LIB_DIR, "libds_kernels_cpu.so")):
        pytest.skip("the kernels are not built")
    abi, isa, why_not = native.kernel_table("cpu")
    assert abi > 0 and isa and not why_not
    assert native.op_status(OPS[0], lambda device: "").installed


def test_small_shared_memory_is_a_warning(monkeypatch):
    monkeypatch.setattr(report, "_shm_bytes", lambda: report.shutil._ntuple_diskusage(64 << 20, 0, 64 << 20))
    assert any("--shm-size" in text for text in report.warnings(FACTS))
