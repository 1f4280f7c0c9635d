"""Monitors receive the metrics of a run: ``engine.monitor.write_events([(name, value, samples), ...])``."""

import atexit
import importlib
import os
import socket
import sys
import tempfile
import types
import weakref

from deepspeed.log import logger, print_rank
from deepspeed.monitor.writer_thread import WriterThread
from deepspeed.registry import Registry

MONITORS = Registry("monitor", group="deepspeed.monitors")
MONITORS.register("tensorboard", "deepspeed.monitor.tensorboard:TensorBoardMonitor")
MONITORS.register("wandb", "deepspeed.monitor.wandb:WandbMonitor")
MONITORS.register("comet", "deepspeed.monitor.comet:CometMonitor")
MONITORS.register("csv_monitor", "deepspeed.monitor.csv_monitor:csvMonitor")

# Sections with a published key -> the attribute of MonitorMaster that scripts know.
_ATTRIBUTES = {
    "tensorboard": "tb_monitor", "wandb": "wandb_monitor", "comet": "comet_monitor", "csv_monitor": "csv_monitor",
}  # fmt: skip


class Monitor:
    """A destination of metrics. A subclass writes them in ``write_events``; rank 0 alone does.

    ``enabled``: whether it receives any. A ``MonitorMaster`` calls the methods of its monitors in a thread of its own.
    """

    def __init__(self, monitor_config):
        self.monitor_config = monitor_config
        self.enabled = bool(getattr(monitor_config, "enabled", False))

    @property
    def writes(self):
        """Whether this process writes."""
        return self.enabled and print_rank() == 0

    def write_events(self, event_list):
        """``event_list``: ``(name, value, step)`` for each metric; the step is the number of samples seen so far."""
        raise NotImplementedError(f"{type(self).__name__} has no write_events(event_list)")

    def flush(self):
        """Returns when all events are where they can be read."""

    def resume(self, step):
        """A checkpoint of ``step`` samples was loaded: what an earlier run has written about later steps is void."""

    def close(self):
        """Nothing comes any more."""
        self.flush()


class MonitorMaster(Monitor):
    """All monitors that the configuration switches on, by name in ``monitors``; on other ranks than 0 there are none.

    A thread of its own writes, so that no disk and no server delays training. What is left is written by ``flush()``
    and at the end of the program, also after an exception. A monitor that fails costs one warning.
    """

    def __init__(self, monitor_config):
        super().__init__(monitor_config)
        sections = _switched_on(monitor_config) if self.writes else ()
        made = {name: MONITORS.get(name)(section) for name, section in sections}
        for name, attribute in _ATTRIBUTES.items():
            setattr(self, attribute, made.get(name))
        self.monitors = {name: monitor for name, monitor in made.items() if monitor.enabled}
        self._thread = WriterThread(self.monitors)
        if self.monitors:
            # After the hooks of the monitors' packages, so that it runs before them.
            atexit.register(self._thread.close)
            weakref.finalize(self, _end, self._thread).atexit = False

    def write_events(self, event_list):
        if self.monitors:
            self._thread.put("write_events", checked(event_list))

    def flush(self):
        self._thread.wait()

    def resume(self, step):
        if self.monitors:
            self._thread.put("resume", step)

    def close(self):
        self._thread.close()


def _end(thread):
    atexit.unregister(thread.close)
    thread.close()


def _switched_on(config):
    """(name, section) of all monitors that are on."""
    for name in _ATTRIBUTES:
        section = getattr(config, name, None)
        if getattr(section, "enabled", False):
            yield name, section
    for name, keys in (getattr(config, "monitors", None) or {}).items():
        section = types.SimpleNamespace(**{"enabled": True, **keys})
        if section.enabled:
            yield name, section


def checked(event_list):
    """The events as ``(text, number, integer)``. Values may be anything that is a number, such as a tensor of one
    element, which is read now. TypeError shows the first item that is something else."""
    found = []
    for item in event_list:
        try:
            name, value, step = item
            if type(name) is not str or isinstance(value, str) or isinstance(step, str):
                raise TypeError("the name is a text, the others are numbers")
            found.append((name, value if type(value) in (int, float) else float(value), int(step)))
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"write_events takes a list of (name, value, number of samples), for example ('Train/loss', 0.5, 64), "
                f"and item {len(found)} is {item!r}: {error}"
            ) from error
    return found


def imported(package, section):
    """The optional ``package`` that the monitor of ``section`` needs; ImportError says how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"{section}.enabled is true, and the package {package} cannot be imported on {socket.gethostname()}, where "
            f"rank 0 runs: {error}. Run '{sys.executable} -m pip install {package}', or set {section}.enabled to false"
        ) from error


def folder_of(section, config, base):
    """The folder for files of a monitor, ``output_path/job_name``, which is made and tried. ``base`` stands for an
    ``output_path`` of None."""
    folder = os.path.join(base if config.output_path is None else config.output_path, config.job_name)
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(
            error.errno,
            f"{error.strerror}: rank 0, on {socket.gethostname()}, cannot write into {os.path.abspath(folder)}. Set "
            f"{section}.output_path to a folder in which it can",
        ) from error
    return folder


def started(monitor, section, start):
    """The result of ``start()``, which begins a run at a server. If it fails, ``monitor`` is off, with one warning."""
    try:
        return start()
    except Exception as error:  # whatever a package raises
        monitor.enabled = False
        logger.warning(
            "The monitor %s cannot begin: %s: %s. Training goes on without it.", section, type(error).__name__, error
        )
