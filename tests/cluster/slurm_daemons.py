"""Slurm on pretended hosts, without systemd: munged with a key and a socket of its own, slurmctld on the head, slurmd
on each other host. Everything they write lies in the cluster's folder.

Needs munge, slurmctld, slurmd and slurm-client (`tools/packages.sh cluster`).
"""

import os
import pathlib
import shutil
import subprocess

from pretended_hosts import wait_until

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")


def why_not():
    """An empty text where Slurm is installed, else the reason."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"{', '.join(missing)} not installed: tools/packages.sh cluster" if missing else ""


class SlurmDaemons:
    """Starts them on ``cluster``, a ``PretendedHosts``, with whose end they end. ``conf``: what SLURM_CONF
    is for srun and the like."""

    def __init__(self, cluster):
        self._cluster = cluster
        self._folder = cluster.path("slurm")
        os.mkdir(self._folder)
        self._file("cgroup.conf", "CgroupPlugin=cgroup/v1\n")  # unused, but slurmd would look for a mounted one
        for name in ("state", "spool-h1", "spool-h2"):
            os.mkdir(os.path.join(self._folder, name))
        self.conf = self._file("slurm.conf", self._settings())
        self._serve_keys()
        cluster.serve("head", shutil.which("slurmctld"), "-D", "-i", "-f", self.conf, log="slurmctld.log")
        for name in ("h1", "h2"):
            cluster.serve(name, shutil.which("slurmd"), "-D", "-N", name, "-f", self.conf, log=f"slurmd-{name}.log")
        wait_until(lambda: set(self.said("sinfo", "-h", "-o", "%T").split()) == {"idle"}, "the nodes are not idle", 30)

    def said(self, *command, **more):
        """The output of one of Slurm's programs on the head."""
        variables = {**os.environ, **more, "SLURM_CONF": self.conf}
        return subprocess.run(self._cluster.on_head(*command), capture_output=True, text=True, env=variables).stdout

    def _file(self, name, text):
        path = os.path.join(self._folder, name)
        pathlib.Path(path).write_text(text)
        return path

    def _serve_keys(self):
        key = os.path.join(self._folder, "munge.key")
        pathlib.Path(key).write_bytes(os.urandom(128))
        os.chmod(key, 0o400)
        files = [f"--{what}={self._folder}/munge.{what}" for what in ("socket", "pid-file", "seed-file", "log-file")]
        self._cluster.serve(
            "head", shutil.which("munged"), "--foreground", "--force", f"--key-file={key}", *files, log="munged.log"
        )
        wait_until(lambda: os.path.exists(f"{self._folder}/munge.socket"), "munged made no socket")

    def _settings(self):
        return f"""
ClusterName=pretended
SlurmctldHost=head
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={self._folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={self._folder}/state
SlurmdSpoolDir={self._folder}/spool-%n
SlurmctldPidFile={self._folder}/slurmctld.pid
SlurmdPidFile={self._folder}/slurmd-%n.pid
KillWait=2
NodeName=h1,h2 CPUs=2 RealMemory=500 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
