"""The hosts themselves: nothing of them outlives the tests, not even tests that are killed."""

import os
import pathlib
import signal
import subprocess
import sys

import pretended_hosts
from processes import wait_for

MAKES = """
import sys, time
sys.path[:0] = sys.argv[1:]
from pretended_hosts import PretendedHosts
from slurm_daemons import SlurmDaemons
with PretendedHosts() as cluster:
    SlurmDaemons(cluster)
    print(cluster.folder, flush=True)
    sys.stdin.read()
"""


def daemons(folder):
    """Command lines of what runs for the hosts in ``folder``."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.append(pathlib.Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        except OSError:  # it has ended
            pass
    return [line for line in found if folder in line]


def test_no_daemon_is_left(slurm):
    for kill in (False, True):
        maker = subprocess.Popen(
            [sys.executable, "-c", MAKES, *sys.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        folder = maker.stdout.readline().strip()
        assert {line.split()[0].rsplit("/", 1)[-1] for line in daemons(folder)} >= {"munged", "slurmctld", "slurmd"}
        maker.send_signal(signal.SIGKILL) if kill else maker.stdin.close()
        maker.wait(60)
        wait_for(lambda folder=folder: not daemons(folder), 30)
        if kill:
            pretended_hosts.remove(maker.pid, folder)
        assert not os.path.exists(folder)
        namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        assert f"dsc{maker.pid}-" not in namespaces and not os.path.exists(f"/etc/netns/dsc{maker.pid}-head")
