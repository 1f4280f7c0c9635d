"""Programs on PATH that pretend to reach other hosts: each runs its command here, in an empty environment."""

import os
import sys

import launching
from processes import write_program

SSH = """#!/bin/bash
# ssh [options] HOST COMMAND
echo "ssh $*" >> "$STAND_IN_LOG"
while [ "${1#-}" != "$1" ]; do case $1 in -o|-p|-l) shift 2;; *) shift;; esac; done
host=$1; shift
case $host in gone*) echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255;; esac
if [ -e "$STAND_IN_LOG.down.$host" ]; then echo "ssh: connect to host $host: No route to host" >&2; exit 255; fi
echo "Welcome to $host"  # a login shell that talks
exec env -i HOME="$HOME" PATH="$PATH" STAND_IN="$host" PYTHONPATH="/only/on/$host" \\
  SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22" sh -c "$*"
"""

PDSH = """#!%(python)s
# pdsh -S -f N -w HOST,... COMMAND: each host's words by a shell, %%h, %%n and %%u as pdsh reads them
import os, re, subprocess, sys
words, hosts = sys.argv[1:], []
while words and words[0].startswith("-"):
    option = words.pop(0)
    value = words.pop(0) if option in ("-f", "-w") else ""
    hosts = value.split(",") if option == "-w" else hosts
assert os.environ["PDSH_RCMD_TYPE"] == "ssh"
open(os.environ["STAND_IN_LOG"], "a").write("pdsh " + " ".join(sys.argv[1:]) + "\\n")
running = []
for number, host in enumerate(hosts):
    told = {"h": host, "n": str(number), "u": "root", "%%": "%%"}
    line = re.sub("%%([hnu%%])", lambda found: told[found[1]], " ".join(words))
    env = {"HOME": os.environ["HOME"], "PATH": os.environ["PATH"], "STAND_IN": host}
    running.append(subprocess.Popen(["sh", "-c", line], env=env, stdin=subprocess.DEVNULL))
sys.exit(max(one.wait() for one in running))
"""

SRUN = """#!%(python)s
# srun [options] COMMAND: -n tasks over --nodelist, in Slurm's own order of nodes
import os, subprocess, sys
words, named = sys.argv[1:], {}
while words and words[0].startswith("-"):
    option = words.pop(0)
    named[option] = words.pop(0)
open(os.environ["STAND_IN_LOG"], "a").write("srun " + " ".join(sys.argv[1:]) + "\\n")
running = []
for number, host in enumerate(sorted(named["--nodelist"].split(","))):
    env = {**os.environ, "SLURM_NODEID": str(number), "SLURMD_NODENAME": host, "STAND_IN": host}
    running.append(subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL))
sys.exit(max(one.wait() for one in running))
"""

MPIRUN = """#!%(python)s
# mpirun -n N ...: starts N processes of what follows the options, with the variables that NAMES in MPI_STYLE has
import os, subprocess, sys
words, count = sys.argv[1:], 0
open(os.environ["STAND_IN_LOG"], "a").write("mpirun " + " ".join(sys.argv[1:]) + "\\n")
long = {"--mca": 2, "-x": 1, "-n": 1, "-np": 1, "-ppn": 1, "-hosts": 1, "-hostfile": 1, "--hostfile": 1, "-genvlist": 1}
while words and words[0].startswith("-"):
    option = words.pop(0)
    values = [words.pop(0) for _ in range(long[option])]
    count = int(values[0]) if option in ("-n", "-np") else count
names = os.environ["MPI_STYLE"].split(",")
running = []
for rank in range(count):
    env = dict(os.environ)
    env.update(zip(names, map(str, (rank, count, 0 if rank == 2 else rank))))
    running.append(subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL))
sys.exit(max(one.wait() for one in running))
"""


def install(folder):
    """Puts all of them into ``folder``."""
    for name, text in {"ssh": SSH, "pdsh": PDSH, "srun": SRUN, "mpirun": MPIRUN}.items():
        write_program(os.path.join(folder, name), text if name == "ssh" else text % {"python": sys.executable}, "")


def environment(**more):
    """That of a job in a folder which has the programs in bin/ and a home."""
    paths = {"PATH": f"{os.path.abspath('bin')}:{os.environ['PATH']}", "HOME": os.path.abspath("home")}
    return launching.environment(**{**paths, "STAND_IN_LOG": os.path.abspath("log"), **more})


def install_here(folder, hosts):
    """The programs, a home and a file of hosts in ``folder``."""
    install(folder / "bin")
    (folder / "home").mkdir()
    (folder / "hosts").write_text(hosts)
