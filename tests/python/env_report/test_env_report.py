"""ds_report: what it shows, and that nothing that is missing makes it fail."""

import os
import re
import subprocess
import sys

import pytest

from deepspeed import env_report
from deepspeed.env_report import native, op_report, report
from deepspeed.host import cpu, libraries
from deepspeed.ops.op_table import OPS
from deepspeed.version import __version__
from processes import run_after_torch, succeeded

PYTHON_DIR = os.path.dirname(os.path.dirname(report.__file__)).rsplit("/deepspeed", 1)[0]


def run(*args, **env):
    """Runs ``python -m deepspeed.env_report``."""
    code = "import runpy; runpy.run_module('deepspeed.env_report', run_name='__main__', alter_sys=True)"
    return run_after_torch(code, *args, **{"PYTHONPATH": PYTHON_DIR, **env})


@pytest.mark.slow
def test_the_program():
    done = succeeded(run())
    for row in OPS:
        (line,) = [line for line in done.stdout.splitlines() if line.split()[:1] == [row.name]]
        assert re.match(rf"{row.name} \.+ (\[YES\] \.{{6}}|\[NO\] \.{{7}}) \[(OKAY|NO)\]", line), line
    assert "cpu_adam ............... [YES] ...... [OKAY]" in done.stdout.splitlines()
    labels = re.findall(r"^(\S.*?) \.{2,} ", done.stdout, re.M)
    assert all(labels.count(label) == 1 for label in (
        "torch install path", "torch version", "deepspeed install path", "deepspeed info", "torch cuda version",
        "nvcc version", "deepspeed wheel compiled w.", "shared memory (/dev/shm) size", "Python", "BLAS in use",
        "compiler", "cores", "instruction set", "CPU kernels use", "CUDA kernels",
        "accelerator", "not hpu", "not npu",
    )), labels  # fmt: skip
    assert __version__ in done.stdout
    assert re.search(r"^not npu \.+ the Python package torch_npu is not installed$", done.stdout, re.M)
    quiet = run("--hide_operator_status", "--hide_errors_and_warnings").stdout
    assert "cpu_adam" not in quiet and "[WARNING]" not in quiet and "Python" in quiet


@pytest.mark.slow
def test_without_torch_and_without_path(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch')\n")
    env = dict(os.environ, PYTHONPATH=f"{tmp_path}{os.pathsep}{PYTHON_DIR}", PATH="")
    done = succeeded(
        subprocess.run([sys.executable, "-m", "deepspeed.env_report"], env=env, capture_output=True, text=True)
    )
    assert "not usable: ImportError: there is no torch" in done.stdout
    assert "[WARNING] torch cannot be imported" in done.stdout and "apt install python3-torch" in done.stdout


def test_a_torch_that_crashes(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("import os; os._exit(77)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{PYTHON_DIR}")
    assert "exit code 77" in report.torch_facts()["error"]


FACTS = dict(
    version="2.0", folder="/t", cuda=None, backends=["gloo"], blas=("reference", "/usr/lib/blas/libblas.so.3"),
    blas_warning="torch's products run on the reference BLAS", mkldnn=True, native="_C.so", gpus=[],
    bf16_products="relative error 2.67%", product_warning="bf16 matrix products are inexact",
)  # fmt: skip


def test_function_and_its_switches(monkeypatch, capsys):
    monkeypatch.setattr(report, "torch_facts", lambda: FACTS)
    env_report.main()
    text = capsys.readouterr().out
    assert "[WARNING] torch's products run on the reference BLAS" in text and "cpu_adam" in text
    assert "[WARNING] bf16 matrix products are inexact" in text
    assert re.search(r"^bf16 products on the CPU \.+ relative error 2\.67%$", text, re.M), text
    env_report.main(hide_operator_status=True, hide_errors_and_warnings=True)
    text = capsys.readouterr().out
    assert "reference (/usr/lib/blas/libblas.so.3)" in text and "WARNING" not in text and "cpu_adam" not in text


def test_op_rows_without_torch(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "LIB_DIR", str(tmp_path))
    rows = {row[0]: row[1:] for row in native.op_rows(OPS, {"error": "gone"})}
    assert rows["utils"] == [True, False, "torch is not usable"]
    assert rows["cpu_adam"][:2] == [False, False] and "run `make`" in rows["cpu_adam"][2]
    assert rows["flash_attn"][2].startswith("not in this build yet; torch")
    assert rows["async_io"] == rows["gds"] == [False, False, "torch is not usable"]  # no module either
    (tmp_path / "libds_kernels_cpu.so").write_text("no library")
    rows = {row[0]: row[1:] for row in native.op_rows(OPS, {"native_error": "no module"})}
    assert "no module; libds_kernels_cpu.so cannot be used" in rows["cpu_adam"][2]
    assert native.op_rows(OPS, {"ops": [["x", True, True, ""]]}) == [["x", True, True, ""]]


@pytest.mark.slow
@pytest.mark.skipif(not native.isa_paths(), reason="the kernels are not built")
def test_units_for_products_are_named(monkeypatch):
    flags = {"avx512f", "avx512_vnni", "amx_int8"}
    monkeypatch.setattr(cpu, "cpu_info", lambda: ("a CPU", flags))
    assert cpu.product_units() == ["vnni", "amx"]
    assert any(line.endswith("scalar, vnni, amx") for line in report.machine_lines({}))


def test_isa_in_use():
    assert native.kernel_table("cpu")[1] in native.isa_paths()
    forced = run("--hide_operator_status", DS_FORCE_ISA="scalar").stdout
    assert re.search(r"^CPU kernels use \.+ scalar \(DS_FORCE_ISA=scalar\), of scalar", forced, re.M), forced
    wrong = run(DS_FORCE_ISA="avx9000").stdout
    assert "[WARNING] the CPU kernels cannot be used: DS_FORCE_ISA=avx9000 is not an instruction set" in wrong
    row = r"^cpu_adam \.+ \[YES\] \.+ \[NO\] +DS_FORCE_ISA=avx9000 is not an instruction set"
    assert re.search(row, wrong, re.M), wrong


def test_missing_system_library(monkeypatch):
    monkeypatch.setattr(libraries, "find_header", lambda name: None)
    monkeypatch.setattr(op_report.devices, "nvidia_device_count", lambda: 0)
    texts = report.warnings(FACTS)
    assert "async_io requires the dev libaio .so object and headers but these were not found." in texts
    assert "async_io: please install the libaio-dev package with apt" in texts
    assert any("CFLAGS and LDFLAGS" in text for text in texts) and not any("cufile" in text for text in texts)
    monkeypatch.setattr(op_report.devices, "nvidia_device_count", lambda: 1)
    assert any(text.startswith("gds requires the dev libcufile") for text in report.warnings(FACTS))


def test_libraries_are_found_by_flags(monkeypatch, tmp_path):
    (tmp_path / "toy.h").write_text("")
    (tmp_path / "libtoy.so").write_text("")
    assert libraries.find_header("toy.h") is None and libraries.find_library("toy") is None
    monkeypatch.setenv("CFLAGS", f"-O2 -I{tmp_path}")
    monkeypatch.setenv("LDFLAGS", f"-L{tmp_path}")
    assert libraries.find_header("toy.h") == str(tmp_path / "toy.h")
    assert libraries.find_library("toy") == str(tmp_path / "libtoy.so")
    assert libraries.missing_libraries("toy", (("toy.h", "toy", "libtoy-dev"),)) == []


@pytest.mark.skipif(
    not os.path.exists(os.path.join(native.LIB_DIR, "libds_kernels_cpu.so")), reason="the kernels are not built"
)
def test_built_kernels_are_recognised():
    abi, isa, why_not = native.kernel_table("cpu")
    assert abi > 0 and isa and not why_not


def test_small_shared_memory_is_a_warning(monkeypatch):
    monkeypatch.setattr(report, "_shm_bytes", lambda: report.shutil._ntuple_diskusage(64 << 20, 0, 64 << 20))
    assert any("--shm-size" in text for text in report.warnings(FACTS))
