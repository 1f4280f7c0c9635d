"""Runs a function in a forked copy of this process, so that everything it sets ends with it."""

import ctypes
import gc
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
import traceback

import torch

_PR_SET_PDEATHSIG = 1


class PlanError(RuntimeError):
    """The text says why there is no plan."""


def run_apart(function, *args):
    """``function(*args)`` in a process of its own; returns its result, which can be pickled.

    The process is a forked child. It uses one thread: those of this process do not exist there. It leaves without
    handlers of the end of the process. torch's autograd works in no child of a process that has run a backward on a
    device; then a new interpreter gets the function and its arguments, which have to be picklable. A ``ValueError`` or
    ``PlanError`` of the function is raised here, too; another error becomes a ``PlanError`` with its traceback.
    """
    return run_each_apart(function, [args])[0]


def run_each_apart(function, rows, together=False):
    """``[function(*args) for args in rows]``, as ``run_apart`` does it, as many at one time as there are cores;
    ``together``: all at one time, because they wait for each other. The first error ends all of them."""
    torch.optim.SGD([torch.zeros(())], lr=1.0)  # torch 2 imports 900 modules for it, here once for all children
    cores, made = len(rows) if together else len(os.sched_getaffinity(0)), []
    for begin in range(0, len(rows), cores):
        children = []
        try:
            for args in rows[begin : begin + cores]:
                children.append(_Child(function, args))
            working = list(children)
            while working:
                ready = multiprocessing.connection.wait([child.pipe for child in working])
                working = [child for child in working if child.pipe not in ready or not child.has_ended()]
            made += [child.value for child in children]
        finally:
            for child in children:
                child.end()
    return made


class _Child:
    """The forked process, which is at work from now on. ``value``: its result, when ``has_ended()`` has been true."""

    def __init__(self, function, args):
        self.function, self.args = function, args
        sys.stdout.flush()
        sys.stderr.flush()
        reads, writes = os.pipe()
        collects = gc.isenabled()
        gc.disable()  # the child would collect what has threads here; ``_answer_forked`` puts it out of reach
        self.pid = os.fork()
        if self.pid == 0:
            _work(function, args, reads, writes)
        if collects:
            gc.enable()
        os.close(writes)
        self.pipe = os.fdopen(reads, "rb")

    def has_ended(self):
        """Waits for its result, or raises its error. False: a new interpreter has begun to work instead."""
        pid, self.pid = self.pid, None
        error, self.value = _told_by(pid, self.pipe)
        if isinstance(error, _NoAutograd):
            self.pid, self.pipe = _begin_anew(self.function, self.args)
            return False
        if error is not None:
            raise error
        return True

    def end(self):
        """Nobody wants its result any more."""
        self.pipe.close()
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


class _NoAutograd(Exception):
    """torch's autograd does not work in a forked child of this process."""


def _work(function, args, reads, writes):
    code = 1
    try:
        os.close(reads)
        with os.fdopen(writes, "wb") as pipe:
            pipe.write(_told(_answer_forked, function, args))
        code = 0
    finally:
        os._exit(code)


def _told(answer, *given):
    """The bytes that ``_told_by`` reads: what ``answer(*given)`` returns, or its error. An answer that cannot be
    pickled is an error, too."""
    try:
        return pickle.dumps(answer(*given))
    except BaseException as error:
        return pickle.dumps((PlanError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}"), None))


def _answer_forked(function, args):
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a caller that is killed leaves no child behind
    gc.freeze()  # what the parent would collect may have threads, which do not exist here
    gc.enable()
    torch.set_num_threads(1)
    return _answer(function, args) if _has_autograd() else (_NoAutograd(), None)


def _has_autograd():
    try:
        torch.ones((), requires_grad=True).exp().backward()
    except RuntimeError:
        return False
    return True


def _answer(function, args):
    """``(error or None, result)``."""
    try:
        return None, function(*args)
    except (ValueError, PlanError) as error:
        if _travels(error):
            return error, None
        return ValueError(f"{type(error).__name__}: {error}"), None
    except Exception as error:
        return PlanError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}"), None


def _travels(error):
    """Whether another process can receive ``error``: a class may have arguments that its pickle does not hold."""
    try:
        return str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:
        return False


def run_anew(function, args, threads):
    """``function(*args)`` in a new interpreter, which uses ``threads`` threads."""
    error, value = _told_by(*_begin_anew(function, args, threads))
    if error is not None:
        raise error
    return value


def _told_by(pid, pipe):
    """Waits for what a process tells at its end: ``(error or None, result)``."""
    with pipe:
        told = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not told:
        raise PlanError(f"the process that planned ended with {_ending(status)} and no result")
    return pickle.loads(told)


def _begin_anew(function, args, threads=1):
    """A new interpreter that does the work: its process id, and the pipe of its answer."""
    advice = "call deepspeed.plan before the first backward, or use ds_plan"
    try:
        given = pickle.dumps((function, args))
    except Exception as error:
        raise PlanError(f"{advice}: the model cannot be sent to a new process ({error})") from None
    if b"__main__" in given:
        raise PlanError(f"{advice}: the model's classes stand in the script, which a new process would run again")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)), OMP_NUM_THREADS=str(threads))
    command = [sys.executable, "-c", "from deepspeed.planner import child; child.answer_stdin()"]
    begun = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    with begun.stdin as pipe:
        pipe.write(given)
    begun.returncode = 0  # it is waited for by its id
    return begun.pid, begun.stdout


def answer_stdin():
    """The work of the new interpreter."""
    with os.fdopen(os.dup(1), "wb") as pipe:
        os.dup2(2, 1)  # what the model prints is no part of the answer
        pipe.write(_told(_answer_given))
    os._exit(0)  # the end of a rank would wait for the others


def _answer_given():
    return _answer(*pickle.load(sys.stdin.buffer))


def _ending(status):
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
