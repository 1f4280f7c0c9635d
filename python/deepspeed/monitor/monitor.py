"""Receives the metrics of a run: ``engine.monitor.write_events([(name, value, step), ...])``."""

from deepspeed.log import print_rank

KINDS = {"tensorboard": "tb_monitor", "wandb": "wandb_monitor", "csv_monitor": "csv_monitor", "comet": "comet_monitor"}


class Monitor:
    """A destination of metrics. A subclass writes them in ``write_events``; ``enabled`` says whether it does."""

    def __init__(self, monitor_config):
        self.monitor_config = monitor_config
        self.enabled = bool(getattr(monitor_config, "enabled", False))

    def write_events(self, event_list):
        """``event_list``: ``(name, value, step)`` for each metric; the step is the number of samples seen so far."""
        raise NotImplementedError(f"{type(self).__name__} has no write_events(event_list)")


class MonitorMaster(Monitor):
    """All monitors that the configuration switches on; rank 0 writes.

    No writer is part of this build, so the configuration refuses to switch one on, and ``enabled`` is False. A program
    that has a writer of its own sets ``engine.monitor`` to a ``Monitor``.
    """

    def __init__(self, monitor_config):
        super().__init__(monitor_config)
        wanted = [kind for kind in KINDS if getattr(getattr(monitor_config, kind, None), "enabled", False)]
        if wanted:
            raise NotImplementedError(
                f"the monitor {', '.join(wanted)} is not supported yet: leave the section out, or set engine.monitor "
                "to a deepspeed.monitor.monitor.Monitor of your own"
            )
        for name in KINDS.values():
            setattr(self, name, None)

    def write_events(self, event_list):
        monitors = (getattr(self, name) for name in KINDS.values()) if print_rank() == 0 else ()
        for monitor in filter(None, monitors):
            monitor.write_events(event_list)
