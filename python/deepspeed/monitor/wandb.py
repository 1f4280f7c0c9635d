"""Metrics for Weights & Biases."""

from deepspeed.monitor.monitor import Monitor, checked, imported, started


class WandbMonitor(Monitor):
    """A run of wandb in ``project``, in the ``group`` and of the ``team`` of the section."""

    def __init__(self, wandb_config):
        super().__init__(wandb_config)
        self.group, self.team, self.project = wandb_config.group, wandb_config.team, wandb_config.project
        if self.writes:
            self._wandb = imported("wandb", "wandb")
            named = {"project": self.project, "group": self.group, "entity": self.team}
            started(self, "wandb", lambda: self._wandb.init(**named))

    def log(self, data, step=None, commit=None):
        """``wandb.log``, on rank 0 of a monitor that is on."""
        return self._wandb.log(data, step=step, commit=commit) if self.writes else None

    def write_events(self, event_list):
        steps = {}
        for name, value, step in checked(event_list) if self.writes else ():
            steps.setdefault(step, {})[name] = value
        for step, data in steps.items():
            self.log(data, step=step)
