"""Runs a function in a forked copy of this process, so that everything it sets ends with it."""

import ctypes
import os
import pickle
import signal
import sys
import traceback

import torch

_PR_SET_PDEATHSIG = 1


class PlanError(RuntimeError):
    """The text says why there is no plan."""


def run_apart(function, *args):
    """``function(*args)`` in a forked child; returns its result, which can be pickled.

    The child uses one thread: those of this process do not exist there. It leaves without handlers of the end of the
    process. A ``ValueError`` or ``PlanError`` of the function is raised here, too; another error becomes
    a ``PlanError`` with its traceback.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        _work(function, args, reads, writes)
    os.close(writes)
    try:
        with os.fdopen(reads, "rb") as pipe:
            told = pipe.read()
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    _, status = os.waitpid(child, 0)
    if not told:
        raise PlanError(f"the process that planned ended with {_ending(status)} and no result")
    error, value = pickle.loads(told)
    if error is not None:
        raise error
    return value


def _work(function, args, reads, writes):
    code = 1
    try:
        os.close(reads)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a caller that is killed leaves no child behind
        torch.set_num_threads(1)
        try:
            told = None, function(*args)
        except (ValueError, PlanError) as error:
            told = type(error)(str(error)), None
        except Exception as error:
            told = PlanError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}"), None
        with os.fdopen(writes, "wb") as pipe:
            pickle.dump(told, pipe)
        code = 0
    finally:
        os._exit(code)


def _ending(status):
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
