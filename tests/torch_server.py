"""The other side of processes.run_after_torch: imports torch once, then forks a process for each code that is to run.

Started as ``python torch_server.py FD``, where FD is a socket to the test's process; ends when that socket closes. What
it forks becomes an ordinary ``python -c code`` in which torch has been imported and nothing of deepspeed: it runs in
``__main__`` to the interpreter's own end, with what that prints, returns and calls at exit.
"""

import os
import pickle
import socket
import sys


def next_code(channel):
    """In a forked process: the code that it is to run."""
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 1 << 16, 2)
        if not message:
            os._exit(0)
        child = os.fork()
        if child == 0:
            channel.close()
            code, args, env, folder = pickle.loads(message)
            for place, fd in enumerate(fds, 1):
                os.dup2(fd, place)
                os.close(fd)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(env)
            sys.path[:] = ["", *filter(None, env["PYTHONPATH"].split(os.pathsep)), *OWN_PATH]
            sys.argv = ["-c", *args]
            return code
        for fd in fds:
            os.close(fd)
        channel.send(pickle.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))


OWN_PATH = sys.path[1:]
import torch.distributed  # noqa: E402, F401  (of all imports this one takes long)

exec(compile(next_code(socket.socket(fileno=int(sys.argv[1]))), "<string>", "exec"), {"__name__": "__main__"})
