"""A Python script as a forked child of a process that has imported what it needs."""

import atexit
import builtins
import os
import signal
import sys
import threading
import traceback
import types

from deepspeed.launcher import linux


def is_script(command):
    """Whether ``command`` is a script that the Python which runs here would run."""
    return command[:2] == [sys.executable, "-u"] and not command[2].startswith("-")


class ForkedScript:
    """Runs ``command`` (``is_script``) as ``subprocess.Popen`` would, in a session of its own, which is there when this
    returns: signals for it and for its group reach only it.

    ``streams``: descriptors of its stdin, stdout, stderr. ``kept``: others that it must have. ``in_child``: called in
    the child first.
    """

    def __init__(self, command, environment, streams, kept, in_child):
        self.returncode = None
        detached, open_until_then = os.pipe()
        # Until the child has its own handlers a signal would run the launcher's there, and be reported to the launcher.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

        def work():
            _detach(streams, kept)
            in_child()
            return _run(command, environment)

        self.pid = linux.fork(work)
        os.close(open_until_then)
        os.read(detached, 1)
        os.close(detached)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _detach(streams, kept):
    os.setsid()
    signal.set_wakeup_fd(-1)
    for sig in signal.valid_signals():
        if callable(signal.getsignal(sig)):
            signal.signal(sig, signal.default_int_handler if sig == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    linux.take_streams(streams, kept)


def _run(command, environment):
    script = os.path.abspath(command[2])
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = command[2:]
    sys.orig_argv[:] = command
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    if "numpy" in sys.modules:  # the module random does so by itself
        sys.modules["numpy"].random.seed()
    main = types.ModuleType("__main__")
    main.__file__, main.__builtins__, main.__cached__ = script, builtins, None
    sys.modules["__main__"] = main
    code = _call(lambda: exec(_compiled(script), vars(main)))
    threading._shutdown()  # waits for its threads
    atexit._run_exitfuncs()
    linux.flush()
    return code


def _compiled(script):
    with open(script, "rb") as file:
        return compile(file.read(), script, "exec", dont_inherit=True)


def _call(function):
    # The exit code of ``function``, as of a program.
    try:
        function()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 255
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        own = error.__traceback__.tb_next.tb_next  # without the frames of this file
        sys.excepthook(type(error), error.with_traceback(own), own)
        return 1
    return 0
