"""Metrics for Comet."""

from deepspeed.monitor.monitor import Monitor, checked, imported, started


class CometMonitor(Monitor):
    """An experiment of Comet. An event of a name is sent when ``samples_log_interval`` samples have been seen since the
    last one of that name."""

    def __init__(self, comet_config):
        super().__init__(comet_config)
        self._interval, self._sent, self._experiment = comet_config.samples_log_interval, {}, None
        if self.writes:
            comet_ml = imported("comet_ml", "comet")
            self._experiment = started(self, "comet", lambda: self._start(comet_ml, comet_config))

    @staticmethod
    def _start(comet_ml, config):
        keys = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
        experiment = comet_ml.start(**{key: getattr(config, key) for key in keys})
        if config.experiment_name is not None:
            experiment.set_name(config.experiment_name)
        return experiment

    @property
    def experiment(self):
        """The experiment, on rank 0 of a monitor that is on."""
        return self._experiment

    @property
    def samples_log_interval(self):
        return self._interval

    def write_events(self, event_list):
        for name, value, step in checked(event_list) if self.writes else ():
            last = self._sent.get(name)
            if last is None or not 0 <= step - last < self._interval:
                self._sent[name] = step
                self._experiment.log_metric(name, value, step=step)

    def flush(self):
        if self.writes:
            self._experiment.flush()
