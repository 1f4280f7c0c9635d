"""Facts about a host, and the speed of its connection to the first host, for ``deepspeed --check``."""

import contextlib
import importlib.util
import os
import re
import shutil
import socket
import statistics
import threading
import time

from deepspeed.host import cpu, devices
from deepspeed.host.ports import port_is_free

_SENT = 64 << 20
_MOST_S = 1.0
_CHUNK = bytes(1 << 20)


def host_facts(folder, script, port):
    """Facts that a job depends on: versions, devices, space, and whether folder, script and port are available."""
    found = os.path.isdir(folder)
    if found:
        os.chdir(folder)
    return {
        "torch": _torch_version(),
        "driver": _first("/proc/driver/nvidia/version", r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)"),
        "gpus": len(devices.visible_gpu_ids()),
        "cores": len(cpu.usable_cores()),
        "memory": cpu.memory_bytes()[1],
        "folder": found,
        "script": not script or os.path.exists(script),
        "disk": shutil.disk_usage(folder).free if found else 0,
        "shm": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        "port": port_is_free(port),
    }


def _torch_version():
    spec = importlib.util.find_spec("torch")
    folder = spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else ""
    return _first(os.path.join(folder, "version.py"), r"__version__\s*=\s*[^'\"]*['\"]([^'\"]+)") if folder else ""


def _first(path, pattern):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            match = re.search(pattern, file.read())
    except OSError:
        return ""
    return match[1] if match else ""


def answer(asked, told, until_lost):
    """The message that answers a question of the head. ``until_lost``: the ``ExitStack`` of the connection to it."""
    if asked == "check":
        return {"checked": host_facts(**told)}
    if asked == "clock":
        return {"clock": time.time()}
    if asked == "measure":
        return {"measured": measure(*told)}
    server = until_lost.enter_context(socket.create_server(("", 0)))
    threading.Thread(target=_echo, args=(server,), daemon=True).start()
    return {"echo": server.getsockname()[1]}


def _echo(server):
    # Answers hosts that measure the connection to this host, each in a thread, until ``server`` is closed.
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_answer_bytes, args=(connection,), daemon=True).start()


def _answer_bytes(connection):
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        while data := connection.recv(1 << 20):
            # Every byte that is not zero is sent back. Only the last byte of a block is not zero.
            if data[-1]:
                connection.sendall(b"e")


def measure(address, port):
    """``{"ms": of a message, "mb_s": of a stream}`` to a host that answers "echo", or ``{"why": no connection}``."""
    try:
        with socket.create_connection((address, port), timeout=10.0) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = []
            for _ in range(20):
                start = time.perf_counter()
                connection.sendall(b"e")
                connection.recv(1)
                times.append(time.perf_counter() - start)
            start, sent = time.perf_counter(), 0
            while sent < _SENT and time.perf_counter() - start < _MOST_S:
                connection.sendall(_CHUNK)
                sent += len(_CHUNK)
            connection.sendall(b"e")
            connection.recv(1)
            return {"ms": statistics.median(times) * 500, "mb_s": sent / (time.perf_counter() - start) / 1e6}
    except OSError as error:
        return {"why": str(error)}
