"""The tasks of a conversion shared out among processes: ``python -m deepspeed.checkpoint.universal_workers FILE``.

They are programs of their own, not forks: who calls the conversion may have threads, or a main module that must not run
twice. Tasks and results travel as JSON, tensors as the files of the conversion.
"""

import json
import os
import subprocess
import sys
import tempfile

from deepspeed.checkpoint.universal_convert import Conversion
from deepspeed.host.cpu import usable_cores

_ERRORS = {kind.__name__: kind for kind in (ValueError, FileNotFoundError, RuntimeError, KeyError)}


def run_tasks(conversion, step, tasks, workers):
    """Results of ``conversion.<step>(task)`` of all tasks, in order. ``workers``: processes; with 1 this one does it.

    An error of a worker is raised here; the others are ended.
    """
    workers = max(1, min(workers, len(tasks)))
    if workers == 1:
        return [getattr(conversion, step)(task) for task in tasks]
    size = -(-len(tasks) // workers)
    with tempfile.TemporaryDirectory(prefix="ds_to_universal_") as folder:
        running = [
            _start(folder, number, conversion, step, tasks[number * size : (number + 1) * size])
            for number in range(workers)
            if tasks[number * size : (number + 1) * size]
        ]
        try:
            return [result for process, path in running for result in _results(process, path)]
        finally:
            for process, _ in running:
                if process.poll() is None:
                    process.kill()
                    process.communicate()


def _start(folder, number, conversion, step, tasks):
    path = os.path.join(folder, f"{number}.json")
    with open(path, "w") as file:
        json.dump({"arguments": conversion.arguments, "step": step, "tasks": tasks}, file)
    threads = max(1, len(usable_cores()) // 2)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }
    command = [sys.executable, "-m", "deepspeed.checkpoint.universal_workers", path]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ), path  # fmt: skip


def _results(process, path):
    _, errors = process.communicate()
    answer = {}
    if os.path.exists(path + ".done"):
        with open(path + ".done") as file:
            answer = json.load(file)
    if "results" in answer:
        return answer["results"]
    if "error" in answer:
        raise _ERRORS.get(answer["error"], RuntimeError)(answer["text"])
    raise RuntimeError(f"a worker of the conversion ended with code {process.returncode}:\n{errors[-2000:]}")


def _work(path):
    with open(path) as file:
        order = json.load(file)
    try:
        conversion = Conversion(**order["arguments"])
        answer = {"results": [getattr(conversion, order["step"])(task) for task in order["tasks"]]}
    except Exception as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    with open(path + ".done", "w") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    _work(sys.argv[1])
