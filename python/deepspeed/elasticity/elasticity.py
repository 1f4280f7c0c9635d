"""``compute_elastic_config``: evaluates the section ``elasticity`` for schedulers, before a job is started."""

import os
import re

from deepspeed.config.elastic_sizes import elastic_sizes
from deepspeed.config.elasticity import (  # noqa: F401
    ELASTICITY,
    elasticity_enabled,
    ensure_immutable_elastic_config,
    resolved_section,
)
from deepspeed.config.errors import ElasticityConfigError, ElasticityError, config_error
from deepspeed.elasticity.constants import MINIMUM_DEEPSPEED_VERSION


def _refuse(text, kind=ElasticityConfigError):
    raise config_error(text, [ELASTICITY], [kind])


def _check_version(target):
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(target))
    if not match:
        _refuse(f"The version of DeepSpeed {target!r} is none: it begins with numbers, as 0.19.6.", ElasticityError)
    oldest = tuple(int(part) for part in MINIMUM_DEEPSPEED_VERSION.split("."))
    if tuple(int(part or 0) for part in match.groups()) < oldest:
        _refuse(
            f"DeepSpeed {target} knows no elasticity: it came with {MINIMUM_DEEPSPEED_VERSION}. Take a newer one.",
            ElasticityError,
        )


def _ranks_of_environment():
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.strip().isdigit() and int(text) > 0 else None


def compute_elastic_config(ds_config, target_deepspeed_version, world_size=0, return_microbatch=False):
    """The train batch size of an elastic job and the numbers of ranks that can share it.

    Args:
        ds_config: a configuration dict with the section ``elasticity``, enabled.
        target_deepspeed_version: of the job that will run.
        world_size: ranks of that job, 0 for "not known yet"; version 0.2 then asks WORLD_SIZE.
        return_microbatch: the micro batch size comes back, too, also without ``world_size``.

    Returns:
        ``(batch, worlds)``, or ``(batch, worlds, micro batch size)``. Version 0.2 counts data-parallel ranks.

    Raises ElasticityConfigError, ElasticityIncompatibleWorldSize or, for a version that is too old, ElasticityError.
    """
    if not isinstance(ds_config, dict):
        raise ValueError(f"ds_config is a {type(ds_config).__name__}; compute_elastic_config takes the dict.")
    if ELASTICITY not in ds_config:
        _refuse('The configuration has no section "elasticity": add it for an elastic job.')
    if not elasticity_enabled(ds_config):
        _refuse('The section "elasticity" is not enabled: set "enabled" to true for an elastic job.')
    values = resolved_section(ds_config[ELASTICITY], "elasticity")
    _check_version(target_deepspeed_version)
    if world_size < 0:
        _refuse(f"world_size is {world_size!r}; it is a number of ranks, or 0 where that is not known yet.")
    known = world_size or None
    if known is None and (return_microbatch or float(values["version"]) >= 0.2):
        known = _ranks_of_environment()
        if known is None and return_microbatch:
            _refuse(
                "The micro batch size depends on the number of ranks: pass world_size, or set the environment variable "
                "WORLD_SIZE."
            )
    sizes = elastic_sizes(values, known)
    if world_size > 0 or return_microbatch:
        return sizes.batch, sizes.worlds, sizes.micro
    return sizes.batch, sizes.worlds
