"""The files that a configuration names to be written. Two keys of one configuration on one path would write over each
other, so that is an error before anything is written. Where another engine of the process writes a path, as with one
configuration for a generator and its critic, this engine writes beside it: ``run-2.jsonl``.
"""

import gc
import itertools
import os
import weakref

from deepspeed._native import DeepSpeedConfigError
from deepspeed.engine import checks
from deepspeed.engine.members import Part, engine_parts
from deepspeed.log import logger

_TABLES = "csv_monitor.output_path"  # a folder; the others are files, or belong to one engine alone
_FOLDERS = {_TABLES, "tensorboard.output_path", "postmortem.dir"}
_owners = weakref.WeakSet()  # parts of the engines that have outputs


def outputs_of(engine):
    """key of the configuration -> absolute path, of what this configuration asks to be written."""
    config, found = engine._config, {}
    if config.step_log_config.enabled and config.step_log_config.file is not None:
        found["step_log.file"] = config.step_log_config.file
    if config.report_config.path is not None:
        found["report.path"] = config.report_config.path
    if config.trace_config.start_step is not None:
        found["trace.path"] = config.trace_config.path
    if engine.flops_profiler_enabled() and engine.flops_profiler_output_file() is not None:
        found["flops_profiler.output_file"] = engine.flops_profiler_output_file()
    if engine.autotuning_enabled():
        given = {"metric_path": engine.autotuning_metric_path(), "model_info_path": engine.autotuning_model_info_path()}
        found.update({f"autotuning.{key}": path for key, path in given.items() if path})
    for kind in ("csv_monitor", "tensorboard"):
        section = getattr(config.monitor_config, kind)
        if section.enabled:
            base = os.path.join(os.path.expanduser("~"), kind) if section.output_path is None else section.output_path
            found[f"{kind}.output_path"] = os.path.join(base, section.job_name)
    if config.postmortem_config.on:
        found["postmortem.dir"] = config.postmortem_config.dir
    return {key: os.path.abspath(path) for key, path in found.items()}


@engine_parts.add("_outputs", order=-1)
class Outputs(Part):
    """A part of the engine, which is made before anything is written. ``paths``: absolute, by keys of the
    configuration; the other parts write to these."""

    def __init__(self, engine):
        super().__init__(engine)
        self.paths = outputs_of(engine)
        if not self.paths:
            return
        checks.refuse_on_all(engine, self._problem() if engine.global_rank == 0 else None, DeepSpeedConfigError)
        numbers = checks.told_by_rank_0(engine, self._free_names() if engine.global_rank == 0 else None)
        self.paths = {
            key: next(itertools.islice(_names(path), numbers.get(key, 0), None)) for key, path in self.paths.items()
        }
        _owners.add(self)

    def stop(self):
        _owners.discard(self)

    def _problem(self):
        for key, path in self.paths.items():
            problem = self.problem_with(key, path)
            if problem is not None:
                return problem
        return None

    def problem_with(self, key, path):
        """The reason why ``path``, which ``key`` names, cannot be written beside the other outputs of this process; or
        None."""
        for other, taken in self.paths.items():
            if other != key and _collide(key, path, other, taken):
                return (
                    f"{key} and {other} both write {path}, so one would write over the other. Name another file in one "
                    "of them"
                )
        return None

    def _free_names(self):
        """key -> the number of the name (``_names``) that no other engine writes."""
        if any(self._is_taken(key, path) for key, path in self.paths.items()):
            gc.collect()  # an engine without references is mostly in a cycle
        found = {}
        for key, path in self.paths.items():
            free = (pair for pair in enumerate(_names(path)) if not self._is_taken(key, pair[1]))
            found[key], name = next(free)
            if name != path:
                logger.warning(
                    f"{key}: another engine of this process writes {path}, so this one writes {name}. Name another "
                    "path in its configuration, or call destroy() of the other engine before"
                )
        return found

    def _is_taken(self, key, path):
        others = [owner for owner in list(_owners) if owner is not self]
        return any(_collide(key, path, *pair) for owner in others for pair in owner.paths.items())


def _names(path):
    """``path``, then the same with a number before its suffix."""
    yield path
    stem, suffix = os.path.splitext(path)
    for number in itertools.count(2):
        yield f"{stem}-{number}{suffix}"


def _collide(key, path, other, taken):
    """Whether two outputs write the same file. Tables of a monitor are all files of their folder with their suffix."""
    if key in _FOLDERS and other in _FOLDERS:
        return key == other and _same(path, taken)
    if other in _FOLDERS or key in _FOLDERS:
        folder, file = (path, taken) if key in _FOLDERS else (taken, path)
        return _TABLES in (key, other) and file.endswith(".csv") and _same(folder, os.path.dirname(file))
    return _same(path, taken)


def _same(one, other):
    """Whether two paths are one file or folder. Devices such as /dev/null may be written by many."""
    if os.path.exists(one) and not (os.path.isfile(one) or os.path.isdir(one)):
        return False
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them is not there yet
        return False
