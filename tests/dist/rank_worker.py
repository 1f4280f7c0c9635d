"""The other side of harness.py: the server that forks rank processes, and what such a process does.

The server imports torch and deepspeed once, stays single-threaded and initialises no device, so that its children may
do anything.
Started as ``python rank_worker.py FD``, where FD is a socket to the pytest process; ends when that socket closes.
"""

import ast
import ctypes
import errno
import faulthandler
import gc
import importlib
import logging
import os
import pathlib
import pickle
import random
import signal
import socket
import sys
import time
import traceback
import types
import weakref
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

import devices

try:  # gives failed asserts of a rank their values, as pytest does in its own process
    from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, get_cache_dir, rewrite_asserts
except ImportError:
    rewrite_asserts = None
try:
    from _pytest.outcomes import Skipped
except ImportError:
    Skipped = ()

PR_SET_PDEATHSIG = 1


def _die_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _listening(port):
    """Whether a process of this machine listens on the port; asks without connecting: two sockets that allow reuse may
    have the same port until one of them listens."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _make_store_patient():
    """torch's store sleeps a whole second when it finds nobody listening yet, which most runs would pay."""
    rendezvous = sys.modules["torch.distributed.rendezvous"]  # the attribute of that name is a function
    plain = rendezvous.TCPStore

    def patient(host_name, port, world_size=None, is_master=False, *args, **kwargs):
        deadline = time.monotonic() + 2
        while not is_master and not _listening(port) and time.monotonic() < deadline:
            time.sleep(0.002)
        return plain(host_name, port, world_size, is_master, *args, **kwargs)

    rendezvous.TCPStore = patient


def serve(channel):
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 1 << 16, 2)
        if not message:
            return
        kind, *rest = pickle.loads(message)
        if kind == "fork":
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                _die_with_parent()
                channel.close()
                if os.getppid() == server:
                    work(Connection(fds[0]), fds[1])
                os._exit(0)
            for fd in fds:
                os.close(fd)
            channel.send(pickle.dumps(pid))
        elif kind == "wait":
            channel.send(pickle.dumps(os.waitpid(rest[0], 0)[1]))


def work(conn, stacks_fd):
    """Runs tasks until the pytest process closes the connection."""
    stacks = os.fdopen(stacks_fd, "wb", buffering=0)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    noted = _Noted()
    while True:
        try:
            task, payload = pickle.loads(conn.recv_bytes()), conn.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        report = _run(task, payload, noted)
        sys.stdout.flush()
        sys.stderr.flush()
        conn.send_bytes(report)
        conn.send_bytes(b"holds groups" if _holds_groups() else b"")


def _run(task, payload, noted):
    try:
        sys.path[:] = task["sys_path"]
        os.chdir(task["cwd"])
        os.environ.clear()
        os.environ.update(task["env"])
        random.seed(1234)
        torch.manual_seed(1234)
        torch.set_default_dtype(torch.float32)
        _reset_log_level()
        _arm_fault()
        devices.choose_backend(task["world_size"])
        fn = _find(task)
        noted.begin()
        gc.freeze()  # what is there now stays, and need not be looked at by every collection: torch 2 alone takes 0.2 s
        args = pickle.loads(payload)
        if task["init"] is True:
            importlib.import_module("deepspeed").init_distributed(dist_backend="gloo")
        elif task["init"]:
            dist.init_process_group(task["init"], init_method="env://")
        with devices.checked():
            value = fn(task["rank"], task["world_size"], *args)
        report = pickle.dumps(("ok", value))
        del value
        _leave_groups(noted)
        devices.check_freed()
        return report
    except Skipped as outcome:  # claims to live in builtins, so pickle refuses it
        return pickle.dumps(("skip", str(outcome)))
    except BaseException as error:  # SystemExit too: the test sees what happened
        text = traceback.format_exc()
        try:
            if type(pickle.loads(pickle.dumps(error))) is type(error):
                return pickle.dumps(("error", error, text))
        except Exception:  # its class cannot be pickled or built again: the text must do
            pass
        return pickle.dumps(("error", None, text))


def _reset_log_level():
    log = sys.modules.get("deepspeed.log")  # a body that builds many engines may have made it quiet
    if log is not None:
        log.logger.setLevel(logging.INFO)


def _arm_fault():
    """DS_IO_FAULT is read when the file writer is imported, and the server may have done that."""
    writer = sys.modules.get("deepspeed.checkpoint.write.file_writer")
    if writer is not None:
        writer.inject_fault(os.environ.get("DS_IO_FAULT", ""))


class _Noted:
    """Objects of engines that outlive those of sharded models, and hold process groups."""

    def __init__(self):
        self.communicators = weakref.WeakSet()  # each is held for as long as its owner lives
        self.accesses = weakref.WeakSet()
        self._hold = None

    def begin(self):
        """deepspeed may have been imported since the last time."""
        held = sys.modules.get("deepspeed.comm.held")
        if held is not None and self._hold is None:
            self._hold, held.hold = held.hold, self.hold
            access = importlib.import_module("deepspeed.zero.parameters.sharded_parameter").ShardAccess
            self._init, access.__init__ = access.__init__, lambda own, *args, **kwargs: self.init(own, *args, **kwargs)

    def hold(self, core, communicators):
        self.communicators.update(one for one in communicators if one is not None)
        return self._hold(core, communicators)

    def init(self, access, *args, **kwargs):
        self.accesses.add(access)
        return self._init(access, *args, **kwargs)

    def let_go(self):
        for communicator in list(self.communicators):
            communicator.leave()
        self.communicators.clear()
        for access in self.accesses:
            access.group = access.copies = None
        self.accesses.clear()


def _leave_groups(noted):
    for _ in range(4):  # engines hold process groups; with an engine goes its hold on others
        if not gc.collect():
            break
    noted.let_go()
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups is not None:
        groups.clear()
    comm = sys.modules.get("deepspeed.comm")
    if comm is not None:
        comm.configure(enabled=False)  # a later run has other processes beside this one, whose log is off
    if comm is not None and comm.is_initialized():
        comm.destroy_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()


def _holds_groups():
    """Whether something of the run holds its process group still. In torch 1.13 the threads of a group whose store has
    gone ask for it all the time: such a worker is not used again."""
    if int(torch.__version__.split(".")[0]) > 1:
        return False
    deadline = time.monotonic() + 0.3
    while (held := len(os.listdir("/proc/self/task")) > 6) and time.monotonic() < deadline:
        time.sleep(0.005)
    return held


def _find(task):
    module = sys.modules.get(task["module"])
    if module is None or os.path.abspath(getattr(module, "__file__", None) or "") != task["path"]:
        module = _load(task["module"], task["path"])
    found = module
    for part in task["qualname"].split("."):
        found = getattr(found, part)
    return getattr(found, "on_ranks", found)


def _load(name, path):
    """Executes the test file as module `name`, with the asserts rewritten where pytest's machinery is there."""
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    try:
        exec(_code(path), module.__dict__)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _code(path):
    """The code that pytest has made of the test file, from pytest's cache where it has one: for a large file making it
    takes longer than most tests."""
    if rewrite_asserts is not None:
        file = pathlib.Path(path)
        cached = _read_pyc(file, get_cache_dir(file) / (file.stem + PYC_TAIL))
        if cached is not None:
            return cached
    with open(path, "rb") as file:
        source = file.read()
    tree = ast.parse(source, filename=path)
    if rewrite_asserts is not None:
        rewrite_asserts(tree, source, path)
    return compile(tree, path, "exec")


def _preload():
    """Modules that every engine needs: a rank that is forked for one test would import it for longer than the test
    takes."""
    try:
        deepspeed = importlib.import_module("deepspeed")
        for name in ("initialize", "zero", "comm", "checkpointing"):
            getattr(deepspeed, name)
    except ImportError:
        pass  # not built: tests that need it say so themselves


def main():
    _die_with_parent()
    _make_store_patient()
    _preload()
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
