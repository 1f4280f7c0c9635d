"""The share of one host in a job, as a message to it: its ranks, their environment, and the address of rank 0."""

import os
from types import SimpleNamespace

from deepspeed.launcher import plan

# Options of the launcher that a host needs to start its ranks.
OPTIONS = (
    "user_script", "user_args", "module", "no_python", "no_local_rank", "bind_cores_to_rank", "bind_core_list",
    "log_rank_prefix", "enable_each_rank_log", "save_pid",
)  # fmt: skip


_RESTART_GRACE_S = 1.0  # between SIGTERM and SIGKILL for ranks that start again at once


class Share:
    """Args:
    host: its name in output lines, empty for none; node: its number. counts: ranks of every host.
    slots: of this host, one per rank. device_ids: the names of these devices, if they are known already.
    options: values of ``OPTIONS``. exports: variables from the host where the job was started.
    folder: the working folder of the ranks; None: that of this process. elastic: variables that tell ranks that the
    job may start again; None: it may not.
    """

    def __init__(
        self, host, node, counts, slots, master_addr, master_port, options, exports=None, folder=None, device_ids=None,
        elastic=None,
    ):  # fmt: skip
        self.host = host
        self.node = node
        self.counts = counts
        self.slots = slots
        self.master_addr = master_addr
        self.master_port = master_port
        self.options = {name: options[name] for name in OPTIONS}
        self.exports = exports or {}
        self.folder = folder
        self.device_ids = device_ids
        self.elastic = elastic

    def as_dict(self):
        """The share as a message; ``Share(**message)`` is its inverse."""
        return dict(vars(self))

    def plan(self, inherited):
        """The ``NodePlan`` on this host, from its environment ``inherited``; LaunchError if it lacks something."""
        args, notes = SimpleNamespace(**self.options), []
        if self.folder is not None:
            self._enter()
        plan.check_script(args)
        base = merged(inherited, self.exports)
        cores = plan.bind_cores(args, len(self.slots), base, notes)
        place = plan.Place(
            self.master_addr, self.master_port, sum(self.counts[: self.node]), sum(self.counts), self.node,
            len(self.counts), self.host,
        )  # fmt: skip
        made = plan.host_plan(args, cores, place, base, self._devices(base, notes), notes)
        if self.elastic is not None:
            made.environments = [{**env, **self.elastic} for env in made.environments]
            made.failure_grace_s = min(made.grace_s, _RESTART_GRACE_S)
        return made

    def _enter(self):
        try:
            os.chdir(self.folder)
        except OSError as error:
            raise plan.LaunchError(
                f"the folder {self.folder}, where the job was started, cannot be entered on this host "
                f"({error.strerror}): start the job in a folder that all hosts share."
            ) from None

    def _devices(self, base, notes):
        if self.device_ids is not None:
            return self.device_ids
        local, on_gpu = plan.local_slots(base, [])
        if on_gpu:
            return plan.gpu_ids(self.slots, local, "the hostfile")
        return self.slots if base.get("DS_ACCELERATOR", "") not in ("", "cpu", "cuda") else None


def merged(inherited, exports):
    """``inherited`` with ``exports``; a search path for modules is put in front of the host's own."""
    base = {**inherited, **exports}
    paths = [path for each in (exports, inherited) for path in each.get("PYTHONPATH", "").split(os.pathsep) if path]
    if paths:
        base["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return base
