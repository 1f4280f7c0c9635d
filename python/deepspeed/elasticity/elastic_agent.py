"""``DSElasticAgent``: torch's own elastic agent, whose workers find given variables in their environment.

It is for programs that use torch's agent. The program ``deepspeed`` does not: it has agents of its own.
"""

import contextlib
import os

from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent


@contextlib.contextmanager
def _environment(variables):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class DSElasticAgent(LocalElasticAgent):
    """A ``LocalElasticAgent`` that starts its workers with the variables ``env`` beside those that torch sets.

    ``spec``, ``start_method``, ``exit_barrier_timeout`` and ``log_dir`` are those of torch's agent.
    """

    def __init__(self, spec, env, start_method="spawn", exit_barrier_timeout=300, log_dir=None):
        logs = getattr(multiprocessing, "DefaultLogsSpecs", None)  # from torch 2.3 on the folder travels in an object
        where = {"log_dir": log_dir} if logs is None else {"logs_specs": logs(log_dir=log_dir)}
        super().__init__(spec, start_method=start_method, exit_barrier_timeout=exit_barrier_timeout, **where)
        self.ds_env = dict(env)

    def _start_workers(self, worker_group):
        spec, hosts = worker_group.spec, worker_group.group_world_size
        layout = {
            "LOCAL_SIZE": str(spec.local_world_size),
            "CROSS_RANK": str(worker_group.group_rank),
            "CROSS_SIZE": str(hosts),
        }
        with _environment({**self.ds_env, **layout}):
            return super()._start_workers(worker_group)
