"""Compares the values that all ranks of an engine must have alike: their configurations, and the numbers that scripts
change later."""

import hashlib
import json

import torch

from deepspeed import _native
from deepspeed import comm as dist
from deepspeed.comm.timed import call_log, suppress_logging
from deepspeed.engine.members import Part, engine_parts

# Keys, sections among them, that may have other values on some ranks: they say where this rank's files are, what it
# reports, and how its own host reads and writes. Nothing that ranks do together depends on them.
MAY_DIFFER = {
    "aio", "autotuning", "comet", "comms_logger", "csv_monitor", "dump_state", "flops_profiler", "log_level",
    "memory_breakdown", "nebula", "report", "step_log.file", "step_log.peak_tflops", "tensorboard",
    "timers", "trace.path", "wall_clock_breakdown", "wandb", "postmortem.dir", "postmortem.keep",
    "postmortem.max_bytes", "datastates_ckpt", "checkpoint.host_cache_size", "zero_optimization.offload_param",
    "zero_optimization.offload_optimizer", "data_efficiency.data_sampling.num_workers",
    "data_efficiency.data_sampling.pin_memory", "data_efficiency.data_sampling.dynamic_batching.metrics_path",
}  # fmt: skip
# Within those sections these count all the same: all ranks open monitors together, and rank 0 writes.
ALIKE = {
    "comet.enabled", "csv_monitor.enabled", "tensorboard.enabled", "wandb.enabled",
    "zero_optimization.offload_param.device", "zero_optimization.offload_optimizer.device",
}  # fmt: skip
MISSING = "<absent>"
MOST = 8  # differences that an error names


def flat(values, prefix=""):
    """``{dotted key: value as text}`` of what must be alike in a resolved configuration. Objects of Python, such as
    groups, are left out."""
    found = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            found.update(flat(value, f"{path}."))
        elif not _may_differ(path) and isinstance(value, (bool, int, float, str, list, tuple, dict, type(None))):
            found[path] = json.dumps(value, default=lambda other: type(other).__name__)
        elif not _may_differ(path) and isinstance(value, torch.dtype):
            found[path] = str(value)
    return found


def _may_differ(path):
    parts = path.split(".")
    return path not in ALIKE and any(".".join(parts[: end + 1]) in MAY_DIFFER for end in range(len(parts)))


def differences(settings):
    """One text for each key that ``settings``, ``[(rank, {key: text})]``, do not have alike."""
    texts = []
    for key in sorted({key for _, one in settings for key in one}):
        ranks_of = {}
        for rank, one in settings:
            ranks_of.setdefault(one.get(key, MISSING), []).append(rank)
        if len(ranks_of) > 1:
            texts.append(f"{key}: " + ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_of.items()))
    return texts


def _ranks(ranks, most=8):
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:most]))}{more}"


@engine_parts.add("_agreement", order=-2)
class Agreement(Part):
    """A part of the engine, which is made before those that communicate: what they do depends on the configuration."""

    _rows = ()  # of the numbers that ``tell`` collects: (parameter group, key, position in its value or None)
    _names = ()
    _told = None  # the numbers that the core has

    def __init__(self, engine):
        super().__init__(engine)
        self._compare_configurations()

    def _compare_configurations(self):
        """Raises ValueError on all ranks of the engine where their configurations differ."""
        parallel, values = self.engine.parallel, flat(self.engine._config.native.values())
        # A log that waits for each collective changes the order in which a rank goes into those of several groups.
        values["comms_logger.enabled"] = json.dumps(call_log.waits)
        if parallel.dp_world_size == parallel.mp_world_size == 1:
            return
        with suppress_logging():
            digests = self._everyones(hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest())
            settings = self._everyones((parallel.rank, values)) if len(set(digests)) > 1 else []
        if not settings:
            return
        texts = differences(sorted(settings, key=lambda one: one[0]))
        more = f"; and {len(texts) - MOST} more" if len(texts) > MOST else ""
        raise ValueError(
            "the configurations of ranks differ, and ranks that train one model need the same. "
            f"{'; '.join(texts[:MOST])}{more}. Give every rank the same configuration"
        )

    def _everyones(self, value):
        """The values of all ranks of the engine: those with the same weights, then those with other parts of them."""
        parallel, found = self.engine.parallel, [value]
        for group, size in ((parallel.dp_group, parallel.dp_world_size), (parallel.mp_group, parallel.mp_world_size)):
            if size > 1:
                lists = [None] * size
                dist.all_gather_object(lists, found, group=group)
                found = [one for of_rank in lists for one in of_rank]
        return found

    def tell(self):
        """Before a backward that may reduce: the hyperparameters and settings with which the next step is made. They
        are compared when it ends (csrc/zero/gradients/agreement.h), and a difference is an error on all ranks."""
        engine = self.engine
        if engine.parallel.dp_world_size == 1 or not engine._trains:
            return
        groups, stepping = engine.stepping.optimizer.param_groups, engine.stepping
        numbers = [
            float(engine.gradient_accumulation_steps()),
            float(engine.train_micro_batch_size_per_gpu()),
            float(stepping.clip or 0.0),
            stepping.loss_scale,
        ]
        try:
            numbers += [
                float(groups[group][key] if position is None else groups[group][key][position])
                for group, key, position in self._rows
            ]
        except (KeyError, IndexError, TypeError, ValueError):  # another kind of value than before
            self._names = ()
        if not self._names or len(groups) != self._groups:
            self._find_rows(groups)
            self.tell()
            return
        if numbers != self._told:
            self._told = numbers
            _native._C.agree(engine.core, engine.global_rank, self._names, numbers)

    def _find_rows(self, groups):
        rows, known = [], hyperparameters_of(self.engine.stepping.optimizer)
        for index, group in enumerate(groups):
            for key in sorted(known & group.keys()):
                value = group[key]
                if isinstance(value, (bool, int, float)):
                    rows.append((index, key, None))
                elif isinstance(value, (tuple, list)) and all(isinstance(one, (int, float)) for one in value):
                    rows += [(index, key, position) for position in range(len(value))]
        self._rows, self._groups, self._told = rows, len(groups), None
        self._names = [
            "gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "gradient_clipping", "the loss scale",
            *(f"{key}{'' if at is None else f'[{at}]'} of parameter group {index}" for index, key, at in rows),
        ]  # fmt: skip


def hyperparameters_of(optimizer):
    """The names of the hyperparameters of an optimizer."""
    return {*getattr(optimizer, "defaults", ()), "lr"} - {"params"}
