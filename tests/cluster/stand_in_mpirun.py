"""An mpirun for MPIs that Debian does not have: Intel MPI's, and with MPI_STYLE=mvapich MVAPICH2's.

It knows the options that these have. A proxy on each host, reached by ssh, starts its ranks with the variables of that
MPI and those of -genvlist, and ends them when the way to mpirun is gone. As Hydra does, it ends all when a rank fails,
says on which host that was, and takes its code.
"""

import base64
import json
import os
import select
import signal
import subprocess
import sys
import time

STYLES = {
    "impi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "mvapich": (
        "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
}  # fmt: skip
OPTIONS = {"impi": ("-ppn", "-genvlist", "-hosts", "-n"), "mvapich": ("-np", "-ppn", "--hostfile", "-genvlist")}


def read(words, style):
    """``({option: value}, the command of the ranks)``; an option that this MPI does not have is an error."""
    named = {}
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option not in OPTIONS[style]:
            sys.exit(f"mpirun ({style}): unrecognized option {option}")
        named[option.lstrip("-")] = words.pop(0)
    return named, words


def mpirun(words):
    """Returns the exit code of the job."""
    style = os.environ.get("MPI_STYLE", "impi")
    if words == ["--version"]:
        print("Intel(R) MPI Library" if style == "impi" else "HYDRA build details: MVAPICH2")
        return 0
    named, command = read(words, style)
    hosts = named["hosts"].split(",") if "hosts" in named else open(named["hostfile"]).read().split()
    count, each = int(named["n"] if "n" in named else named["np"]), int(named["ppn"])
    shared = {name: os.environ[name] for name in named.get("genvlist", "").split(",") if name in os.environ}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    proxies = []
    try:
        for number, host in enumerate(hosts):
            here = range(number * each, min(count, (number + 1) * each))
            own = [dict(zip(STYLES[style], map(str, (r, count, r - here[0], len(here))))) for r in here]
            ranks = [{**shared, **mine} for mine in own]
            told = json.dumps({"command": command, "folder": os.getcwd(), "ranks": ranks})
            proxy = subprocess.Popen(["ssh", "-T", host, sys.executable, __file__, "--proxy"], stdin=subprocess.PIPE)
            proxy.stdin.write(base64.b64encode(told.encode()) + b"\n")
            proxy.stdin.flush()
            proxies.append(proxy)
        while not all(proxy.poll() == 0 for proxy in proxies):
            for host, proxy in zip(hosts, proxies):
                code = proxy.poll()
                if code:
                    print(f"=   BAD TERMINATION OF A RANK RUNNING AT {host}\n=   EXIT CODE: {code}", file=sys.stderr)
                    return code
            time.sleep(0.02)
        return 0
    except KeyboardInterrupt:
        return 130
    finally:
        for proxy in proxies:
            proxy.stdin.close()  # it ends its ranks
        for proxy in proxies:
            proxy.wait()


def proxy():
    """Runs the ranks of one host; returns the code of the first that fails."""
    told = json.loads(base64.b64decode(sys.stdin.buffer.raw.readline()))
    os.chdir(told["folder"])
    ranks = [
        subprocess.Popen(told["command"], env={**os.environ, **more}, stdin=subprocess.DEVNULL, start_new_session=True)
        for more in told["ranks"]
    ]
    try:
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks) or select.select([0], [], [], 0.02)[0]:
                break
        return next((rank.poll() for rank in ranks if rank.poll()), 0)
    finally:
        for sig in (signal.SIGTERM, signal.SIGKILL):
            for rank in ranks:
                if rank.poll() is None:
                    os.killpg(rank.pid, sig)
            ended = time.monotonic() + 1
            while any(rank.poll() is None for rank in ranks) and time.monotonic() < ended:
                time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(proxy() if sys.argv[1:] == ["--proxy"] else mpirun(sys.argv[1:]))
