"""Starts one node's ranks under two processes that guard each other.

The front process is the one the user sees: it takes signals and gives the exit code. Its child, the supervisor, owns
the ranks. Each of the two ends everything below it when the other is killed, and both adopt orphans, so that neither
a rank nor a helper that a rank started survives the job.
"""

import os
import signal
import sys
import time
import traceback

from deepspeed.launcher import linux
from deepspeed.launcher.supervisor import Supervisor

_FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
)


def launch(plan):
    """Runs a ``NodePlan``; returns the exit code of the job when no process of it is left."""
    if plan.log_dir:
        os.makedirs(plan.log_dir, exist_ok=True)
    pid_file = _write_pid_file() if plan.save_pid else None
    sys.stdout.flush()
    sys.stderr.flush()
    linux.become_subreaper()
    front = os.getpid()
    # Processes of a program that calls us are none of our business.
    others = set(linux.descendants(front))
    # Who ignores it (some daemons do, and children inherit that) gets no status of an ended child.
    child_handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Blocked until the supervisor is ready for them: a signal between fork and its handlers would be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    supervisor = os.fork()
    if supervisor == 0:
        _be_supervisor(plan, front)
    try:
        return _wait(supervisor, others)
    finally:
        linux.become_subreaper(False)
        signal.signal(signal.SIGCHLD, child_handler or signal.SIG_DFL)
        if pid_file:
            os.unlink(pid_file)


def _be_supervisor(plan, front):
    code = 1
    try:
        supervisor = Supervisor(plan, front)
        code = supervisor.run()
    except OSError as error:
        print(f"deepspeed: error: a rank could not be started: {error}", file=sys.stderr)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(supervisor, others):
    def forward(sig, frame):
        linux.kill(supervisor, sig)

    def pause(sig, frame):
        # Ctrl-Z: the ranks are not in the terminal's group, so they are stopped and continued by us.
        linux.kill(supervisor, signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGSTOP)
        linux.kill(supervisor, signal.SIGCONT)

    # What was ignored when we came (nohup, a background job of a script) stays ignored.
    heard = [sig for sig in (*_FORWARDED, signal.SIGTSTP) if signal.getsignal(sig) != signal.SIG_IGN]
    before = {sig: signal.signal(sig, pause if sig == signal.SIGTSTP else forward) for sig in heard}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    try:
        _, status = os.waitpid(supervisor, 0)
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # killed: nobody else is left to clean up
        _kill_descendants(others)
        sys.stderr.write(f"deepspeed: the supervising process was killed by signal {-code}; the job was ended.\n")
        return 128 - code
    return code


def _kill_descendants(others):
    while True:
        left = [pid for pid in linux.descendants(os.getpid()) if pid not in others]
        if not left:
            return
        for pid in left:
            linux.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _write_pid_file():
    path = f"/tmp/{os.getpid()}.ds"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "w") as file:
        file.write(str(os.getpid()))
    return path
