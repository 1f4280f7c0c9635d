"""Compares the section ``elasticity`` with the scheduler's copy of it, and with the number of ranks."""

import json
import os

from deepspeed._native import DeepSpeedConfigError
from deepspeed.config.elastic_sizes import elastic_sizes, elastic_worlds
from deepspeed.config.errors import (
    ElasticityConfigError,
    ElasticityIncompatibleWorldSize,
    config_error,
    raise_if_broken,
)
from deepspeed.config.read import read
from deepspeed.host.launcher_messages import tell_launcher
from deepspeed.log import logger

ELASTICITY = "elasticity"
SCHEDULER_VARIABLE = "DEEPSPEED_ELASTICITY_CONFIG"
# These do not change which batch sizes and world sizes are possible.
FREE_KEYS = (
    "enabled", "min_time", "ignore_non_elastic_batch_info", "save_on_signal", "memory_copies", "snapshot_steps",
)  # fmt: skip


def elasticity_enabled(ds_config):
    """Whether a configuration dict switches elastic training on."""
    section = ds_config.get(ELASTICITY)
    return isinstance(section, dict) and bool(section.get("enabled", False))


def resolved_section(section, source):
    """The values of ``section`` with its defaults; ElasticityConfigError, which names ``source``, for what is wrong."""
    native = read({ELASTICITY: section}, strict=False, sections_only=True)
    try:
        raise_if_broken(native, built_only=False)
    except DeepSpeedConfigError as error:
        raise config_error(f"{source}: {error}", [ELASTICITY], [ElasticityConfigError], section) from None
    return native.values()[ELASTICITY]


def scheduler_section():
    """The section that the scheduler put into DEEPSPEED_ELASTICITY_CONFIG, as JSON; None when it did not."""
    text = os.environ.get(SCHEDULER_VARIABLE, "")
    if not text:
        return None
    try:
        section = json.loads(text)
    except ValueError as error:
        section, problem = None, f" ({error})"
    else:
        problem = ""
    if not isinstance(section, dict):
        raise config_error(
            f"The environment variable {SCHEDULER_VARIABLE} = {text[:200]!r} must be the JSON text of the section "
            f'"elasticity"{problem}.',
            [ELASTICITY],
            [ElasticityConfigError],
            text,
        )
    return resolved_section(section, f"The environment variable {SCHEDULER_VARIABLE}")


def difference_from_scheduler(values):
    """The differences between the resolved section ``values`` and the scheduler's copy, as text; "" if none."""
    scheduled = scheduler_section()
    if scheduled is None:
        return ""
    parts = [
        f"elasticity.{key} = {json.dumps(values[key])} here and {json.dumps(scheduled[key])} there"
        for key in values
        if key not in FREE_KEYS and values[key] != scheduled[key]
    ]
    if not parts:
        return ""
    return (
        f"The section elasticity does not agree with the environment variable {SCHEDULER_VARIABLE}, from which the "
        f"scheduler chooses the number of ranks: {'; '.join(parts)}. Give both the same values."
    )


def ensure_immutable_elastic_config(runtime_elastic_config_dict):
    """Checks that the section ``elasticity`` of this job is the one that the scheduler starts ranks by.

    Raises ElasticityConfigError when they differ. Without DEEPSPEED_ELASTICITY_CONFIG there is nothing to compare, and
    a warning says that the scheduler may start a number of ranks that does not fit.
    """
    if not os.environ.get(SCHEDULER_VARIABLE):
        logger.warning(
            "%s is not set: nothing makes sure that the scheduler starts a number of ranks that the section "
            "elasticity allows.",
            SCHEDULER_VARIABLE,
        )
        return
    values = resolved_section(runtime_elastic_config_dict, "elasticity")
    text = difference_from_scheduler(values)
    if text:
        raise config_error(text, [ELASTICITY], [ElasticityConfigError], runtime_elastic_config_dict)


def check_ranks(native, ranks, source):
    """Adds to ``native`` what is wrong between its section ``elasticity``, the scheduler and the number of ``ranks``.

    ``source``: where that number came from; None when it is not known and not checked. Returns whether all is well.
    """
    values = native.values()[ELASTICITY]
    try:
        text = difference_from_scheduler(values)
    except DeepSpeedConfigError as error:
        text = str(error)
    if text:
        native.add_error("scheduler", ["elasticity.enabled"], text, False)
        return False
    low, high = values["min_gpus"], values["max_gpus"]
    if source is not None and low <= high and not low <= ranks <= high:
        native.add_error(
            "world_size_not_elastic",
            ["elasticity.min_gpus", "elasticity.max_gpus"],
            f"elasticity.min_gpus = {low}, elasticity.max_gpus = {high}: there are {ranks} ranks ({source}). "
            f"Start {low} to {high} ranks.",
            False,
        )
        return False
    return True


def tell_worlds(native, ranks, data_parallel):
    """Tells the launcher of an elastic job which numbers of ranks can share the batch, also where those at hand cannot.

    ``ranks``: of the job; ``data_parallel``: those of them that see different samples.
    """
    values = native.values()[ELASTICITY]
    worlds = elastic_worlds(values)
    if float(values["version"]) >= 0.2:
        shared = values["model_parallel_size"]
    else:
        shared = max(1, ranks // max(1, data_parallel))
    if worlds:
        tell_launcher(worlds=[world * shared for world in worlds], min_time=values["min_time"])


def choose_sizes(native, ranks, data_parallel):
    """``ElasticSizes`` for a configuration whose section is enabled, or None after adding to ``native`` why not.

    ``ranks`` None: not known yet; version 0.2 cannot choose then, and None comes back without an error.
    """
    values = native.values()[ELASTICITY]
    if ranks is None and float(values["version"]) >= 0.2:
        return None
    try:
        return elastic_sizes(values, ranks, data_parallel)
    except DeepSpeedConfigError as error:
        fits_none = isinstance(error, ElasticityIncompatibleWorldSize)
        code = "world_size_not_elastic" if fits_none else "elastic"
        native.add_error(code, ["elasticity.enabled"], str(error), False)
        return None
