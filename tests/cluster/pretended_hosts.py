"""Hosts that are namespaces of this machine: each with a network, a name, processes, a /dev/shm, a /tmp and an sshd of
its own. They share the cluster's folder, and what lies elsewhere. All of them end with the process that made them.

Needs root, iproute2 and openssh-server (`tools/packages.sh cluster`).
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

from deepspeed.launcher import linux
from processes import running

NAMES = ("head", "h1", "h2")
_OWN_PROCESSES = ("--pid", "--fork", "--kill-child", "--mount-proc")
_OWN = ("unshare", "--uts", "--mount", *_OWN_PROCESSES)
_MOUNTS = """
hostname "$0" && mount -t tmpfs shm /dev/shm && mount --bind "$1/ssh_config" /etc/ssh/ssh_config &&
mount -t tmpfs tmp /tmp && exec"""


def why_not():
    """An empty text where hosts can be pretended, else the reason."""
    if os.geteuid() != 0:
        return "needs root, to make namespaces"
    missing = [name for name in ("ip", "sshd", "ssh", "pdsh", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed: tools/packages.sh cluster"
    tried = subprocess.run([*_OWN, "--net", "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"namespaces are not allowed here: {tried.stderr.strip()}"


def _tag(pid):
    # The beginning of the names of namespaces that this process makes.
    return f"dsc{pid}"


def remove(pid, folder):
    """The files on the disk of the hosts that the process ``pid`` made in ``folder``."""
    for name in (*NAMES, "net"):
        subprocess.run(["ip", "netns", "del", f"{_tag(pid)}-{name}"], capture_output=True)
        shutil.rmtree(f"/etc/netns/{_tag(pid)}-{name}", ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


class PretendedHosts:
    """``head`` starts jobs; ``h1`` and ``h2`` run an sshd. A context manager.

    Processes of the head are the test's, which signals them; ``h1`` and ``h2`` have process numbers of their own.
    """

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="ds-cluster-", dir="/var/tmp")  # each has a /tmp of its own
        self._tag = _tag(os.getpid())
        self._subnet = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self._servers = {}  # host -> what holds its namespaces
        self._daemons = []  # (host, process, program) of what ``serve`` started

    def __enter__(self):
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for _, daemon, _ in reversed(self._daemons):
            daemon.terminate()
        for _, daemon, _ in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
        last = [self._first(name) for name in self._servers]  # with the first process of a host all others end
        for server in [*(daemon for _, daemon, _ in self._daemons), *self._servers.values()]:
            server.kill()
            server.wait()
        with contextlib.suppress(AssertionError):  # the folder goes in any event
            wait_until(lambda: not any(map(running, last)), "")
        remove(os.getpid(), self.folder)

    def path(self, name):
        """A file of the cluster's own folder."""
        return os.path.join(self.folder, name)

    def _make(self):
        hub = f"{self._tag}-net"
        for line in (f"netns add {hub}", f"-n {hub} link add hub type bridge", f"-n {hub} link set hub up"):
            run("ip", *line.split())
        table = "127.0.0.1 localhost\n" + "".join(f"{self._subnet}.{i} {n}\n" for i, n in enumerate(NAMES, 1))
        for number, name in enumerate(NAMES, 1):
            here = f"{self._tag}-{name}"
            for line in (
                f"netns add {here}",
                f"-n {here} link add eth0 type veth peer name to{number} netns {hub}",
                f"-n {hub} link set to{number} master hub up",
                f"-n {here} addr add {self._subnet}.{number}/24 dev eth0",
                f"-n {here} link set eth0 up",
                f"-n {here} link set lo up",
            ):
                run("ip", *line.split())
            os.makedirs(f"/etc/netns/{here}", exist_ok=True)
            pathlib.Path(f"/etc/netns/{here}/hosts").write_text(table)
        for key in ("host", "user"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.path(key))
        shutil.copy(self.path("user.pub"), self.path("authorized"))
        os.makedirs("/run/sshd", exist_ok=True)
        self._write(
            "sshd_config",
            f"""
            HostKey {self.path("host")}
            AuthorizedKeysFile {self.path("authorized")}
            PermitRootLogin yes
            StrictModes no
            UsePAM no
            PidFile none
            MaxStartups 100
        """,
        )
        self._write(
            "ssh_config",
            f"""
            IdentityFile {self.path("user")}
            UserKnownHostsFile /dev/null
            StrictHostKeyChecking no
            LogLevel ERROR
        """,
        )
        for name in NAMES:
            line = f"{_MOUNTS} {'sleep infinity' if name == 'head' else '/usr/sbin/sshd -D -e -f $1/sshd_config'}"
            own = [word for word in _OWN if name != "head" or word not in _OWN_PROCESSES]
            self._servers[name] = self._popen(*self.inside(name, *own, "sh", "-c", line, name, self.folder))
        wait_until(lambda: self._is_up("head"), "the head has no /tmp of its own")
        for name in ("h1", "h2"):
            asked = self.on_head("ssh", "-F", self.path("ssh_config"), name, "true")
            wait_until(lambda asked=asked: subprocess.run(asked).returncode == 0, f"the sshd of {name} does not answer")

    def _is_up(self, name):
        # Its last mount was made: /tmp is another file system than ours.
        return os.stat(f"/proc/{self._first(name)}/root/tmp").st_dev != os.stat("/tmp").st_dev

    def _popen(self, *command, **more):
        test = os.getpid()
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, preexec_fn=lambda: linux.die_with_parent(test, signal.SIGKILL),
            **{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **more},
        )  # fmt: skip

    def _write(self, name, text):
        pathlib.Path(self.path(name)).write_text("\n".join(line.strip() for line in text.strip().splitlines()) + "\n")

    def inside(self, name, *command):
        """``command`` as it runs in the network of a host."""
        return ["ip", "netns", "exec", f"{self._tag}-{name}", *command]

    def on_head(self, *command):
        """``command`` as it runs on the head."""
        return self.on("head", *command)

    def on(self, name, *command):
        """``command`` as it runs on a host, in the folder where it is started. Under ``h1`` and ``h2`` the process that
        is started waits for the one on the host."""
        spaces = ("--uts", "--mount", "--net", *(() if name == "head" else ("--pid",)))
        folder = ("sh", "-c", 'cd "$0" && exec "$@"', os.getcwd())
        return ["nsenter", "--target", str(self._first(name)), *spaces, *folder, *command]

    def serve(self, name, *command, log):
        """Starts a program on a host that runs as long as the cluster, and is none of the ``processes`` of a job."""
        with open(self.path(log), "wb") as file:
            process = self._popen(*self.on(name, *command), stdout=file, stderr=file)
        self._daemons.append((name, process, command[0]))

    def _first(self, name):
        pid = self._servers[name].pid
        if name == "head":
            return pid
        return int(pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def _commands(self, name):
        # (pid here, command line) of all processes of a host but the first.
        first = self._first(name)
        kind = "mnt" if name == "head" else "pid"
        space = os.readlink(f"/proc/{first}/ns/{kind}")
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{pid}/ns/{kind}") == space and int(pid) != first:
                    yield int(pid), pathlib.Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            except OSError:  # it has ended
                pass

    def processes(self, name):
        """Command lines of what runs on a host beside its daemons; sessions of sshd outlive a cable that is cut."""
        daemons = [program for host, _, program in self._daemons if host == name]
        own = ("sshd: ", *[f"{one} " for one in daemons], *[f"{os.path.basename(one)}: " for one in daemons])
        found = [line for _, line in self._commands(name)]
        return [line for line in found if line and not line.startswith(own)]  # the dead have none

    def kill(self, name, word):
        """Kills the first process of a host whose command line has ``word`` in it; those forked from it have it."""
        os.kill(min(pid for pid, line in self._commands(name) if word in line), signal.SIGKILL)

    def left(self, name):
        """The files in the /dev/shm and the /tmp of a host, beside the cache that torch 2 keeps there."""
        root = f"/proc/{self._first(name)}/root"
        found = [f"{place}/{one}" for place in ("/dev/shm", "/tmp") for one in os.listdir(root + place)]
        return [one for one in found if not one.startswith("/tmp/torchinductor_")]

    def cut(self, name):
        """Takes a host's cable away."""
        run("ip", "-n", f"{self._tag}-net", "link", "set", f"to{NAMES.index(name) + 1}", "down")

    def mend(self, name):
        """Puts it back."""
        run("ip", "-n", f"{self._tag}-net", "link", "set", f"to{NAMES.index(name) + 1}", "up")


def run(*command):
    """Runs a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def wait_until(condition, why, seconds=20):
    """Waits for ``condition()``; the assertion that it came true says ``why``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, why
        time.sleep(0.05)
