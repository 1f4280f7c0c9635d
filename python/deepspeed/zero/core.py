"""Builds the native engine core from parameter groups."""

import contextlib

import torch

from deepspeed import _native
from deepspeed.comm import held, mesh_views
from deepspeed.config.errors import raise_if_broken
from deepspeed.config.read import read
from deepspeed.log import logger
from deepspeed.zero.parameters.param_ranks import folds_of, ranks_of


def build_core(
    param_groups,
    config=None,
    names=None,
    orders=None,
    copied_along=None,
    grad_forms=None,
    others=(),
    grad_dtype=None,
    rules=(),
    mesh=None,
    window=None,
    codes_weights=False,
    codes_frozen=False,
):
    """Returns ``(core, names)``.

    ``param_groups`` are those of an optimizer, ``config`` a resolved configuration (``DeepSpeedConfig.native``, or
    ``core_config``). ``names`` and ``orders`` map a parameter's id to its name and to its position in the module;
    without them parameters are called ``group.index`` and ordered as given. ``copied_along``: a function of a parameter
    that names the axis of the mesh along which an earlier rank trains a copy of it, or "". ``grad_forms``: the id of a
    parameter -> 1 where only the touched rows of its gradient travel (stage 0), 2 where the user's optimizer gets them
    as a sparse tensor, too. ``others``: sharded parameters that are not trained. ``grad_dtype``: in which gradients are
    kept; None: in the parameter's own. ``rules``: of each parameter group (``ops.by_name.rules_of``), for
    ``zero_optimization.placement``; () counts two states of each element. ``mesh``: the native ``ProcessMesh`` of the
    ranks that train, with the axes pp, dp, sp and tp; None: this rank trains alone. ``window``: the native accumulation
    window that the caller drives; by default the core has one of its own. ``codes_weights``, ``codes_frozen``: ZeRO++
    and MixZ++, also where the configuration does not ask for them. The threads of CPU kernels are
    ``torch.get_num_threads()``.
    """
    rows = []
    for index, group in enumerate(param_groups):
        for position, param in enumerate(group["params"]):
            name = (names or {}).get(id(param), f"{index}.{position}")
            order = (orders or {}).get(id(param), len(rows) + 1)
            form = (grad_forms or {}).get(id(param), 0)
            rule = ranks_of(param).rule if ranks_of(param) is not None else "dense"
            copied = "" if copied_along is None else copied_along(param)
            rows.append((param, name, index, order, form, getattr(param, "ds_handle", None), rule, copied))
    for param in others:
        if ranks_of(param) is not None:
            param.ds_handle.rule = ranks_of(param).rule
    mesh = mesh_views.adopted(None) if mesh is None else mesh
    for rule, lists in sorted(folds_of([*(row[0] for row in rows), *others]).items()):
        mesh.fold_lists(rule, list(lists.items()))
    core = _native._C.Engine(
        params=rows,
        others=[param.ds_handle for param in others],
        mesh=mesh,
        config=core_config({}) if config is None else config,
        threads=torch.get_num_threads(),
        grad_dtype=grad_dtype,
        rules=list(rules),
        window=window,
        codes_weights=codes_weights,
        codes_frozen=codes_frozen,
    )
    held.hold(core, core.communicators)
    return core, [row[1] for row in rows]


def writing(core):
    """A context in which all ranks change masters or slices of ``core``; of None it does nothing. It closes on
    exceptions, too."""
    return contextlib.nullcontext() if core is None else _native._C.WriteContext(core)


@contextlib.contextmanager
def aborted_together(core):
    """A context for a backward that ``core.begin_backward`` has begun. Where it raises, ``core`` forgets it, and the
    other ranks are told in the reduction that they do together: theirs ends with an error, too."""
    try:
        yield
    except Exception:
        try:
            if core.abort_backward_together():
                logger.warning("backward failed; the gradients of earlier micro steps of this step are lost with it")
        except RuntimeError as error:
            logger.warning("the other ranks cannot go on after the backward that failed here: %s", error)
        raise
    except BaseException:  # the process is asked to end, and so waits for nobody
        core.abort_backward()
        raise


def core_config(sections):
    """A resolved configuration of these sections alone, for an optimizer that is made by hand."""
    native = read(sections, strict=False, sections_only=True)
    raise_if_broken(native)
    return native


def section_values(section):
    """A section of the configuration, a dict or an object of it, as plain values; {} for None."""
    if section is None:
        return {}
    values = section if isinstance(section, dict) else section.model_dump()
    plain = {key: getattr(value, "value", value) for key, value in values.items() if value is not None}
    return {key: value if isinstance(value, (bool, int, float, dict)) else str(value) for key, value in plain.items()}
