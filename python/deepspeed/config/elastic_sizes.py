"""The batch sizes that the section ``elasticity`` chooses; the arithmetic is csrc/plan/elastic_plan."""

from typing import NamedTuple

from deepspeed._native import _C
from deepspeed.config.errors import ElasticityConfigError, ElasticityIncompatibleWorldSize, config_error
from deepspeed.log import logger

_KEYS = ["elasticity.max_train_batch_size", "elasticity.micro_batch_sizes"]


class ElasticSizes(NamedTuple):
    """``batch``: samples per step; ``worlds``: numbers of data-parallel ranks that share it; ``micro``: samples per
    rank and forward for the ranks at hand, None where their number is not known."""

    batch: int
    worlds: list
    micro: int | None = None


def _request(values, low, high):
    sizes = values["micro_batch_sizes"]
    return _C.elastic.Request(values["max_train_batch_size"], sizes, low, high, values["prefer_larger_batch"])


def _refuse(text, keys=_KEYS, kind=ElasticityConfigError, value=None):
    raise config_error(f"elasticity: {text}", keys, [kind], value) from None


def _native(call, *arguments):
    try:
        return call(*arguments)
    except ValueError as error:
        return _refuse(str(error))


def elastic_sizes(values, ranks=None, data_parallel=None):
    """``ElasticSizes`` by the resolved section ``values``.

    Args:
        ranks: of the job; version 0.2 needs them, version 0.1 only for ``micro``.
        data_parallel: ranks that see different samples; default: ``ranks`` by ``model_parallel_size``.

    Raises ElasticityConfigError where the section allows no batch, and ElasticityIncompatibleWorldSize, which names the
    nearest choices, where it allows one but not for that many ranks.
    """
    if float(values["version"]) < 0.2:
        return _version_1(values, data_parallel or ranks)
    if ranks is None:
        _refuse(
            "version 0.2 chooses the batch for the ranks at hand, and their number is not known. Pass world_size, or "
            "set the environment variable WORLD_SIZE.",
            ["elasticity.version"],
        )
    return _version_2(values, ranks)


def elastic_worlds(values):
    """The numbers of data-parallel ranks that can share the batch by the section ``values``; none where it is wrong."""
    request = _request(values, values["min_gpus"], values["max_gpus"])
    try:
        if float(values["version"]) < 0.2:
            return _C.elastic.plan(request)[1]
        return _C.elastic.node_worlds(request, values["num_gpus_per_node"], values["model_parallel_size"])
    except ValueError:
        return []


def _version_1(values, ranks):
    low, high = values["min_gpus"], values["max_gpus"]
    batch, worlds = _native(_C.elastic.plan, _request(values, low, high))
    if not worlds:
        anywhere = _native(_C.elastic.plan, _request(values, 1, 2**31))[1]
        _refuse(
            f"no train batch size up to {values['max_train_batch_size']} made of {values['micro_batch_sizes']} can be "
            f"shared by {low} to {high} ranks. {_nearest(anywhere, low)} Change min_gpus, max_gpus or "
            f"max_train_batch_size.",
            ["elasticity.min_gpus", "elasticity.max_gpus", *_KEYS],
        )
    if ranks is None:
        return ElasticSizes(batch, worlds)
    if ranks not in worlds:
        _refuse(
            f"{ranks} ranks cannot share the train batch size {batch}. {_nearest(worlds, ranks)} All that can: "
            f"{_shown(worlds)}.",
            ["elasticity.min_gpus", "elasticity.max_gpus"],
            ElasticityIncompatibleWorldSize,
        )
    return ElasticSizes(batch, worlds, _C.elastic.micro(batch, ranks, values["micro_batch_sizes"], True))


def _version_2(values, ranks):
    nodes = (values["num_gpus_per_node"], values["model_parallel_size"])
    if nodes[0] % nodes[1] == 0 and ranks % nodes[0]:
        below = max(1, ranks // nodes[0]) * nodes[0]
        _refuse(
            f"{ranks} ranks are not whole nodes of {nodes[0]} (num_gpus_per_node). The nearest are {below} and "
            f"{(ranks // nodes[0] + 1) * nodes[0]}.",
            ["elasticity.num_gpus_per_node"],
            ElasticityIncompatibleWorldSize,
        )
    request = _request(values, values["min_gpus"], values["max_gpus"])
    batch, worlds, micro, listed = _native(_C.elastic.node_plan, request, *nodes, ranks)
    if not batch or not micro:
        _refuse(
            f"{ranks} ranks need more than max_train_batch_size = {values['max_train_batch_size']} samples even with "
            f"the smallest of micro_batch_sizes = {values['micro_batch_sizes']}. Start fewer ranks or raise the limit.",
            _KEYS,
            ElasticityIncompatibleWorldSize,
        )
    if not listed:
        logger.warning(
            "elasticity: %d ranks are in no list of numbers that share one train batch size; they train with %d "
            "samples per step. With another number of ranks the batch, and so the training, will differ.",
            ranks,
            batch,
        )
    return ElasticSizes(batch, worlds, micro)


def _nearest(worlds, ranks):
    below = [world for world in worlds if world < ranks][-1:]
    above = [world for world in worlds if world > ranks][:1]
    return f"The nearest numbers that can are {' and '.join(map(str, below + above))}." if below + above else ""


def _shown(worlds):
    text = [str(world) for world in worlds]
    return ", ".join(text) if len(text) <= 40 else f"{', '.join(text[:20])} ... {', '.join(text[-20:])}"
