"""`make test-gpu`: everything that only a device can show, as one list with a result for each row.

    python tests/device/checklist.py [--device cuda] [--programs build/<tag>/bin] [--json FILE] [--only REGEX]
        [--sample] [arguments of pytest]

`make test-gpu DEVICE=standin` runs the list on the stand-in device (tests/device/standin.py), and so tests it.

A row is `ok`, `differs` (with what was expected and what was found) or `not run` (with the reason). A row names the
claim of CHANGELOG.md that it settles, if there is one. Rows of kernels are C++ tests that compare a body with plain
loops; rows of training are pytest functions, each with all its cases: those marked `gpu` and, with the engine on the
device, those marked `any_device`; with --sample one case of each of their files. The exit code is 0 if no row differs
and any row was run.
"""

import argparse
import dataclasses
import glob
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
FOLDERS = ("tests", "tests/device", "tests/dist", "python", "benchmarks/python")
sys.path[:0] = [os.path.join(ROOT, folder) for folder in FOLDERS]

import devices  # noqa: E402  (the path above makes it importable)
import sampling  # noqa: E402

# The rows that settle a sentence of CHANGELOG.md: a regular expression for names of rows, and words of the sentence.
SETTLES = {
    r"^kernels: CudaTest\.|^training: test_(engine|zero)_gpu": "Buffers know streams.",
    r"^training: test_comm_nccl_gpu": "Operations of `deepspeed.comm` on tensors of devices run over native",
    r"^measure: train_gpt": "GPTs of 125M and 1.3B parameters against plain torch, step time and peak memory",
}
KERNEL_PROGRAMS = {"test_kernels": "Cuda*", "test_optim": "Cuda*"}
# Names of ctest whose programs run their tests of streams, events and copies on the stand-in device.
ON_STANDIN = {"test_storage": "storage.standin", "test_comm": "comm.standin", "test_zero": "zero.standin"}


@dataclasses.dataclass
class Row:
    name: str
    result: str  # ok, differs, not run
    detail: str = ""
    seconds: float = 0.0

    @property
    def settles(self):
        return next((words for pattern, words in SETTLES.items() if re.search(pattern, self.name)), "")


# ---- the machine ---------------------------------------------------------------------------------------------------
def machine_rows(device):
    import torch

    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    same = accelerator._name == device
    yield Row("machine: accelerator", "ok" if same else "differs", f"expected {device}, found {accelerator._name}")
    if device != "cuda":
        return
    properties = torch.cuda.get_device_properties(0)
    detail = f"{properties.name}, {torch.cuda.device_count()} of them, torch {torch.__version__}"
    yield Row("machine: device", "ok", detail)


# ---- kernels -------------------------------------------------------------------------------------------------------
def kernel_rows(device, programs):
    """A row for each C++ test of a CUDA body. For the stand-in device the bodies are compiled for the CPU."""
    environment = dict(os.environ)
    if device == "standin":
        environment["DS_CUDA_KERNELS"] = os.path.join(programs, "libds_kernels_cuda_on_cpu.so")
    for program, pattern in KERNEL_PROGRAMS.items():
        path = os.path.join(programs, program)
        if not os.path.exists(path):
            yield Row(f"kernels: {program}", "not run", f"{path} is not there: tools/build.sh tests")
            continue
        with tempfile.TemporaryDirectory() as folder:
            report = os.path.join(folder, "report.json")
            done = subprocess.run(
                [path, f"--gtest_filter={pattern}", f"--gtest_output=json:{report}"],
                env=environment,
                capture_output=True,
                text=True,
                timeout=1200,
            )
            if not os.path.exists(report):
                yield Row(f"kernels: {program}", "differs", f"ended with code {done.returncode}: {done.stderr[-300:]}")
                continue
            with open(report, encoding="utf-8") as file:
                suites = json.load(file)["testsuites"]
        for suite in suites:
            for test in suite["testsuite"]:
                name = f"kernels: {test['classname']}.{test['name']}"
                seconds = float(test["time"].rstrip("s"))
                if test["result"] == "SKIPPED":
                    said = re.search(rf"{re.escape(test['name'])}\n(?:.*Skipped\n)?(.*)", done.stdout)
                    yield Row(name, "not run", said.group(1)[:200] if said else "skipped")
                elif test.get("failures"):
                    yield Row(name, "differs", test["failures"][0]["failure"][:400], seconds)
                else:
                    yield Row(name, "ok", "", seconds)


# ---- streams -------------------------------------------------------------------------------------------------------
def stream_rows(device, programs):
    """A row for each room whose C++ tests run on the stand-in device."""
    if device != "standin":
        yield Row(
            "streams: all",
            "not run",
            "the C++ tests of streams know the CPU and the stand-in device; training shows them",
        )
        return
    for program, name in ON_STANDIN.items():
        if not os.path.exists(os.path.join(programs, program)):
            yield Row(
                f"streams: {name}", "not run", f"{program} is not in {programs or 'no folder'}: tools/build.sh tests"
            )
            continue
        command = ["ctest", "--test-dir", os.path.dirname(programs.rstrip("/")), "-R", f"^{re.escape(name)}$"]
        started = time.monotonic()
        done = subprocess.run([*command, "--output-on-failure", "--no-tests=error"], capture_output=True, text=True)
        found = re.findall(r"\[  FAILED  \] (\S+)", done.stdout)
        detail = f"failed: {', '.join(dict.fromkeys(found)) or done.stdout[-300:]}" if done.returncode else ""
        yield Row(f"streams: {name}", "differs" if done.returncode else "ok", detail, time.monotonic() - started)


# ---- training ------------------------------------------------------------------------------------------------------
def training_rows(device, more, sample=False):
    """A row for each test function of pytest; it has all cases of the function. ``sample``: one case of each file."""
    marks = "any_device" if device == "cpu" else "gpu or any_device"
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.xml")
        environment = dict(os.environ, DS_TEST_DEVICE=device)
        environment.pop("DS_ACCELERATOR", None)
        if sample:
            environment.pop(sampling.VARIABLE, None)
            environment[sampling.COVER] = sampling.ONE_OF_A_FILE
        workers = max(1, min(14, (os.cpu_count() or 1) - 2))
        command = [sys.executable, "-m", "pytest", "-q", "-m", marks, f"--junitxml={report}", *more]
        if workers > 1 and _has_xdist():
            command += ["-n", str(workers)]
        done = subprocess.run([*command, *_marked_files()], env=environment, cwd=ROOT, text=True)
        if not os.path.exists(report):
            yield Row("training: pytest", "differs", f"pytest ended with code {done.returncode} and wrote no report")
            return
        cases = {}
        for case in ElementTree.parse(report).iter("testcase"):
            function = re.sub(r"\[.*", "", case.get("name"), flags=re.S)
            cases.setdefault(f"training: {case.get('classname').split('.')[-1]}.{function}", []).append(case)
    for name, found in cases.items():
        failed = [case for case in found if case.find("failure") is not None or case.find("error") is not None]
        skipped = [case for case in found if case.find("skipped") is not None]
        seconds = sum(float(case.get("time")) for case in found)
        if failed:
            problem = failed[0].find("failure") if failed[0].find("failure") is not None else failed[0].find("error")
            detail = f"{len(failed)} of {len(found)} cases; {failed[0].get('name')}: {problem.get('message')[:300]}"
            yield Row(name, "differs", detail, seconds)
        elif len(skipped) == len(found):
            yield Row(name, "not run", skipped[0].find("skipped").get("message")[:200], seconds)
        else:
            yield Row(name, "ok", f"{len(found) - len(skipped)} cases", seconds)


def _marked_files():
    """The test files that have one of the marks: to import all others would take longer than their tests."""
    for path in sorted(glob.glob(os.path.join(ROOT, "tests", "**", "test_*.py"), recursive=True)):
        with open(path, encoding="utf-8") as file:
            if re.search(r"mark\.(gpu|any_device)\b", file.read()):
                yield path


def _has_xdist():
    import importlib.util

    return importlib.util.find_spec("xdist") is not None


# ---- measures ------------------------------------------------------------------------------------------------------
def copy_rates():
    """Copies of 256 MiB, each a median of ten, in GB/s."""
    import statistics

    import torch

    numel = 1 << 26
    host, pinned = torch.empty(numel), torch.empty(numel, pin_memory=True)
    device, other = torch.empty(numel, device="cuda"), torch.empty(numel, device="cuda")
    rates = {}
    for name, to, source, moved in (
        ("pinned to device", device, pinned, 1),
        ("device to pinned", pinned, device, 1),
        ("pageable to device", device, host, 1),
        ("device to device, read and written", device, other, 2),
    ):
        times = []
        for _ in range(12):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            to.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        rates[name] = moved * 4 * numel / statistics.median(times[2:]) / 1e9
    return rates


def measure_rows(device, figures):
    if device != "cuda":
        yield Row("measure: all", "not run", "times of this device say nothing about a GPU")
        return
    figures["copy_gb_per_s"] = copy_rates()
    for name, rate in figures["copy_gb_per_s"].items():
        yield Row(f"measure: copy {name}", "ok", f"{rate:.1f} GB/s")
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "train_gpt.json")
        script = os.path.join(ROOT, "benchmarks", "python", "train_gpt.py")
        command = [sys.executable, script, "--device", "cuda", "--models", "125m", "--rounds", "1", "--json", out]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if done.returncode or not os.path.exists(out):
            yield Row("measure: train_gpt", "differs", f"ended with code {done.returncode}: {done.stderr[-300:]}")
            return
        with open(out, encoding="utf-8") as file:
            figures["train_gpt"] = json.load(file)["figures"]["models"]
    for model, found in figures["train_gpt"].items():
        for name, one in found["contenders"].items():
            detail = f"{one['step_s'] * 1e3:.1f} ms, {one['ratio_to_masters']:.3f} of torch with fp32 masters, "
            yield Row(f"measure: train_gpt {model} {name}", "ok", detail + f"peak {one['peak_bytes'] / 2**30:.2f} GiB")


# ---- all -----------------------------------------------------------------------------------------------------------
def show(row):
    settles = f"  [settles: {row.settles}]" if row.settles and row.result != "not run" else ""
    print(f"{row.result:8s} {row.seconds:7.1f} s  {row.name}  {row.detail}{settles}", flush=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", default="cuda", help="the name of an accelerator: cuda, cpu or one that a package adds"
    )
    parser.add_argument("--programs", default="", help="the folder of the C++ test programs")
    parser.add_argument("--json", metavar="FILE", help="write the rows and figures there")
    parser.add_argument(
        "--only", default=".", metavar="REGEX", help="parts: machine, kernels, streams, training, measure"
    )
    parser.add_argument("--sample", action="store_true", help="of training one case of each file")
    parser.add_argument("pytest", nargs="*", help="more arguments for pytest")
    args = parser.parse_args(arguments)
    os.environ["DS_ACCELERATOR"] = args.device
    devices.add_package(args.device)
    figures, rows = {}, []
    parts = {
        "machine": lambda: machine_rows(args.device),
        "kernels": lambda: kernel_rows(args.device, args.programs),
        "streams": lambda: stream_rows(args.device, args.programs),
        "training": lambda: training_rows(args.device, args.pytest, args.sample),
        "measure": lambda: measure_rows(args.device, figures),  # last, on a machine that does nothing else
    }
    chosen = [name for name in parts if re.search(args.only, name)]
    for name in chosen:
        for row in parts[name]():
            rows.append(row)
            show(row)
    counts = {result: sum(row.result == result for row in rows) for result in ("ok", "differs", "not run")}
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    if args.json:
        from common import machine

        listed = [{**dataclasses.asdict(row), "settles": row.settles} for row in rows]
        machine.write_json(args.json, "gpu_checklist", {"device": args.device, "rows": listed, **figures})
    return 1 if counts["differs"] or not counts["ok"] else 0


if __name__ == "__main__":
    sys.exit(main())
