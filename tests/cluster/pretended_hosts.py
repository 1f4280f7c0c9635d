"""Hosts that are namespaces of this machine: each with a network, a name, processes, a /dev/shm, a /tmp and an sshd of
its own. They share the cluster's folder, and what lies elsewhere.

Needs root, iproute2 and openssh-server (`tools/packages.sh cluster`).
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time

NAMES = ("head", "h1", "h2")
_OWN = ("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_MOUNTS = 'hostname "$0" && mount -t tmpfs shm /dev/shm && mount -t tmpfs tmp /tmp'


def why_not():
    """An empty text where hosts can be pretended, else the reason."""
    if os.geteuid() != 0:
        return "needs root, to make namespaces"
    missing = [name for name in ("ip", "sshd", "ssh", "pdsh", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed: tools/packages.sh cluster"
    tried = subprocess.run([*_OWN, "--net", "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"namespaces are not allowed here: {tried.stderr.strip()}"


class PretendedHosts:
    """``head`` starts jobs; ``h1`` and ``h2`` run an sshd. A context manager."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="ds-cluster-", dir="/var/tmp")  # each has a /tmp of its own
        self._tag = f"dsc{os.getpid()}"
        self._subnet = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self._servers = {}

    def __enter__(self):
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for server in self._servers.values():
            server.kill()
            server.wait()
        for name in (*NAMES, "net"):
            subprocess.run(["ip", "netns", "del", f"{self._tag}-{name}"], capture_output=True)
            shutil.rmtree(f"/etc/netns/{self._tag}-{name}", ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def path(self, name):
        """A file of the cluster's own folder."""
        return os.path.join(self.folder, name)

    def _make(self):
        hub = f"{self._tag}-net"
        run("ip", "netns", "add", hub)
        run("ip", "-n", hub, "link", "add", "hub", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "hub", "up")
        table = "127.0.0.1 localhost\n" + "".join(f"{self._subnet}.{i} {n}\n" for i, n in enumerate(NAMES, 1))
        for number, name in enumerate(NAMES, 1):
            here = f"{self._tag}-{name}"
            run("ip", "netns", "add", here)
            run("ip", "-n", here, "link", "add", "eth0", "type", "veth", "peer", "name", f"to{number}", "netns", hub)
            run("ip", "-n", hub, "link", "set", f"to{number}", "master", "hub", "up")
            run("ip", "-n", here, "addr", "add", f"{self._subnet}.{number}/24", "dev", "eth0")
            run("ip", "-n", here, "link", "set", "eth0", "up")
            run("ip", "-n", here, "link", "set", "lo", "up")
            os.makedirs(f"/etc/netns/{here}", exist_ok=True)
            with open(f"/etc/netns/{here}/hosts", "w") as file:
                file.write(table)
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
        for name in ("h1", "h2"):
            line = f'{_MOUNTS} && exec /usr/sbin/sshd -D -e -f "$1"'
            command = self.inside(name, *_OWN, "sh", "-c", line, name, self.path("sshd_config"))
            self._servers[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        for name in ("h1", "h2"):
            while subprocess.run(self.on_head("ssh", "-F", self.path("ssh_config"), name, "true")).returncode:
                assert time.monotonic() < deadline, f"the sshd of {name} does not answer"
                time.sleep(0.1)

    def _write(self, name, text):
        with open(self.path(name), "w") as file:
            file.write("\n".join(line.strip() for line in text.strip().splitlines()) + "\n")

    def inside(self, name, *command):
        """``command`` as it runs in the network of a host."""
        return ["ip", "netns", "exec", f"{self._tag}-{name}", *command]

    def on_head(self, *command):
        """``command`` as it runs on the head. Its processes are those of the test, which signals them."""
        line = f'{_MOUNTS} && exec "$@"'
        return self.inside("head", "unshare", "--uts", "--mount", "sh", "-c", line, "head", *command)

    def _first(self, name):
        pid = self._servers[name].pid
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return int(file.read().split()[0])

    def _commands(self, name):
        # (pid here, command line) of all processes of a host but the first.
        first = self._first(name)
        space = os.readlink(f"/proc/{first}/ns/pid")
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{pid}/ns/pid") == space and int(pid) != first:
                    with open(f"/proc/{pid}/cmdline") as file:
                        yield int(pid), file.read().replace("\0", " ").strip()
            except OSError:  # it has ended
                pass

    def processes(self, name):
        """Command lines of what runs on a host beside its sshd, whose sessions outlive a cable that is cut."""
        found = [line for _, line in self._commands(name)]
        return [line for line in found if line and not line.startswith("sshd: ")]  # the dead have none

    def kill(self, name, word):
        """Kills the first process of a host whose command line has ``word`` in it; those forked from it have it."""
        victim = min(pid for pid, line in self._commands(name) if word in line)
        os.kill(victim, signal.SIGKILL)

    def left(self, name):
        """What lies in the /dev/shm and the /tmp of a host, beside the cache that torch 2 keeps there."""
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
