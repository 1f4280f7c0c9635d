"""The content of a checkpoint in the native format: tensors in safetensors files, all else in JSON.

A rank's files are made from what it owns; the only collective is the agreement that every value can be written.
"""

import functools
import json
import math
import types

import torch

from deepspeed import comm as dist
from deepspeed._native import _C
from deepspeed.checkpoint.layouts import names, saved_native
from deepspeed.checkpoint.layouts.names import key_of
from deepspeed.checkpoint.layouts.saved_native import NotPlain
from deepspeed.checkpoint.read.weights import run_states
from deepspeed.checkpoint.save.contents import counters_of
from deepspeed.checkpoint.save.frozen_files import Digest, FrozenFile
from deepspeed.checkpoint.write.by_rank import saves, wide_names
from deepspeed.checkpoint.write.file_writer import (
    SAFETENSORS_NAMES,
    PreparedBytes,
    PreparedSafetensors,
    is_plain,
)
from deepspeed.checkpoint.write.ranks import Ranks, failure_of, raise_together
from deepspeed.comm.agreement import attempt
from deepspeed.version import __version__
from deepspeed.zero.parameters.param_ranks import ranks_of, saved_part, shape_of
from deepspeed.zero.parameters.sharded_parameter import is_sharded
from deepspeed.zero.states.named_states import NamedStates, positioned

# ---- native tensors ------------------------------------------------------------------------------------------------
# Which tensors a rank saves in the native format. No collective: what a rank owns is known, and views of it are
# handed out. Where several ranks own the same (stage 0, MiCS, experts), they share the writing, by elements
# (``writers_of`` of csrc/plan/saved_layout.h).


def owned(run):
    """``NamedStates`` of this rank: masters and states that it saves, tensors by key."""
    if run.states is None:
        return NamedStates({}, {}, {})
    takes = _shares(run, [param for _, param in run.trained()])
    found = run.states.named(takes.__getitem__)
    for kind in {kind for kind, *_ in found.tensors} - {names.MASTER}:
        if not isinstance(kind, str) or "/" in kind or kind in names.RESERVED:
            raise NotPlain(
                f"the optimizer {run.states.made_by} has a state called {kind!r}, a name that a "
                'checkpoint in the native format cannot use: set "checkpoint": {"writer": {"format": "torch"}}'
            )
    found.tensors = {key_of(*key): tensor for key, tensor in found.tensors.items()}
    return found


def _shares(run, params, cut=None):
    """For each parameter whether this rank saves it: those that several ranks have alike are shared out
    among them. ``cut``: whether ranks have slices; None: as they have of masters."""
    dp_rank, dp_world = run.ranks.dp_rank, run.ranks.dp_world_size
    cut = run.policy.shards_states if cut is None else cut
    sharing = run.ranks.holders if run.policy.shards_params else dp_world  # ranks that have one copy, if it is cut
    groups = {}  # ranks with the same (None: all) -> the numbers of the parameters
    for index, param in enumerate(params):
        groups.setdefault(getattr(ranks_of(param), "copies", None), []).append(index)
    taken = [False] * len(params)
    for group, indices in groups.items():
        if group is None:  # this rank is the ``number``-th of ``count`` that own the same
            number, count = (dp_rank // sharing, dp_world // sharing) if cut else (dp_rank, dp_world)
        else:
            number, count = (0, 1) if cut else (dist.get_rank(group), dist.get_world_size(group))
        takers = _C.writers_of([shape_of(params[index]).numel() for index in indices], count)
        for index, taker in zip(indices, takers):
            taken[index] = taker == number
    return taken


def kept_params(run, exclude_frozen):
    """``[(name, parameter)]`` of the module, tied ones once, without those that want no gradient if asked so."""
    trained = run.trained_ids()
    return [
        (name, param)
        for name, param in run.weights.unique()
        if not exclude_frozen or param.requires_grad or id(param) in trained
    ]


def untrained(run, exclude_frozen, named):
    """``(tensors, frozen tensors)`` by key: what this rank saves of parameters that no master covers; frozen are those
    that want no gradient. At stage 3 a rank has slices."""
    trained = run.trained_ids()
    params = [(name, param) for name, param in kept_params(run, exclude_frozen) if id(param) not in trained]
    takes = _shares(run, [param for _, param in params], cut=run.policy.shards_params)
    changing, frozen = {}, {}
    for (name, param), mine in zip(params, takes):
        if not mine:
            continue
        begin, value = 0, param
        if is_sharded(param):
            handle = param.ds_handle
            begin, value = handle.own_begin, handle.shard[: max(0, handle.own_numel)]
            if not value.numel() and handle.numel:
                continue
        offset, value = positioned(param, begin, value.detach())
        (changing if param.requires_grad else frozen)[key_of(names.MODULE, named(name), offset)] = value
    return changing, frozen


def others_of_module(run, exclude_frozen, named):
    """``(tensors, values, keys, metadata)``: entries of the module's state dict that are no parameters and that this
    rank is to save, tensors by key and values by name; all its names; the versions of its modules."""
    state = run.module_state(exclude_frozen_parameters=exclude_frozen)
    params, copies = run.weights.params, run.weights.copies
    mine = {  # at stage 3 a rank gets back its own
        named(name): value
        for name, value in state.items()
        if name not in params and (saves(run, copies.get(name)) or run.policy.shards_params)
    }
    tensors = {key_of(names.MODULE, name): value.detach() for name, value in mine.items() if torch.is_tensor(value)}
    values = {name: value for name, value in mine.items() if not torch.is_tensor(value)}
    return tensors, values, [named(name) for name in state], dict(getattr(state, "_metadata", {}))


# ---- native contents -----------------------------------------------------------------------------------------------

_METADATA = {"format": "pt", "written_by": f"{names.FORMAT} {names.VERSION}"}
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def is_wanted(run):
    """Whether the configuration asks for this format."""
    return getattr(run.config.checkpoint_config.writer, "format", None) == "safetensors"


def files_of(run, client_state, exclude_frozen_parameters=False):
    """dict: name of a file -> function that gives its value, for the files of this rank. Every rank calls it.

    Raises ``NotPlain`` on all ranks for a value that JSON cannot hold; nothing has been written then.
    """
    made, error = attempt(lambda: _Contents(run, exclude_frozen_parameters))
    ranks, of_all = Ranks(run.ranks, False), None
    if run.weights.differs:
        of_all = ranks.gather(made.about_params() if made is not None else None)
    files, error = attempt(lambda: made.files(client_state, of_all)) if error is None else ({}, error)
    told = ranks.gather([failure_of(ranks.rank, error), str(error) if isinstance(error, NotPlain) else None])
    not_plain = [f"rank {failure[0]}: {text}" for failure, text in told if text is not None]
    if not_plain:
        raise NotPlain(f"nothing is saved: {not_plain[0]}") from error
    raise_together([failure for failure, _ in told], "nothing is saved", error)
    return {name: lambda file=file: file for name, file in files.items()}


class _Contents:
    """The contents of the files of this rank."""

    def __init__(self, run, exclude_frozen):
        writer = run.writer
        if getattr(writer, "makes_files", True) and not hasattr(writer, "write_file"):
            raise ValueError(
                f"the checkpoint engine {type(writer).__name__} writes whole objects, not safetensors: take one of "
                'this library\'s for "checkpoint": {"writer": {"format": "safetensors"}}, or set the format to "torch"'
            )
        self.run, self.exclude_frozen, self.named = run, exclude_frozen, run.weights.named
        self.owned = owned(run)
        self.changing, self.frozen = untrained(run, exclude_frozen, self.named)
        self.others = others_of_module(run, exclude_frozen, self.named)

    def about_params(self):
        """Facts of this rank's parameters that the first rank writes, as JSON can hold them."""
        run = self.run
        return {
            "mp_rank": run.ranks.mp_rank,
            "parameters": _parameters(run, self.exclude_frozen, self.named),
            "groups": [list(group) for group in run.group_names],
            "tied": run.weights.tied(),
            "wide": sorted(wide_names(run)),
            "keys": self.others[2],
            "buffers": [self.named(name) for name in run.weights.buffers],
        }

    def files(self, client_state, of_all):
        """name -> value. ``of_all``: ``about_params`` of all ranks where they differ, else None."""
        run, values = self.run, {}
        encode = functools.partial(saved_native.encode, tensors=values)
        leads, mp_rank = run.ranks.dp_rank == 0, run.ranks.mp_rank
        tensors = {**self.owned.tensors, **self.changing, **self.others[0]}
        resumed = {key: value for key, value in run_states(run).items() if key != "group_names"}
        about_rank = {
            "run": encode(resumed, where="run"),
            "scalars": encode(self.owned.scalars, where="optimizer state"),
            "strides": self.owned.strides,
        }
        found = {}
        if leads:
            mine = self.about_params()
            everyones = [about for about in of_all or () if about is not None]
            wide = {name for about in everyones for name in about["wide"]}
            others = [about if about["mp_rank"] == mp_rank else _only(about, wide) for about in everyones]
            about = _checkpoint(run, client_state, self.others, encode, _joined(mine, others))
            found[names.checkpoint_json(mp_rank)] = PreparedBytes(_text(about))
        tensors.update({key_of(names.VALUES, key): tensor for key, tensor in values.items()})
        _check({**tensors, **self.frozen})
        rank = run.ranks.rank
        made = {names.RANK_TENSORS(rank=rank): PreparedSafetensors(tensors, _METADATA)} if tensors else {}
        if self.frozen:
            kept = run.memo.setdefault("frozen files", {"digest": Digest(), "sound": set()})
            digest = kept["digest"].of(self.frozen, f"{names.VERSION} {mp_rank}")
            made[names.FROZEN_TENSORS(digest=digest)] = FrozenFile(self.frozen, _METADATA, kept["sound"])
        about_rank["files"] = list(made)
        return {**found, **made, names.RANK_JSON(rank=rank): PreparedBytes(_text(about_rank))}


def _only(about, wide):
    """``about_params`` of a rank with another part of the model, with the parameters ``wide`` alone."""
    return {
        "parameters": {name: known for name, known in about["parameters"].items() if name in wide},
        "groups": [[name for name in group if name in wide] for group in about["groups"]],
        "tied": {},
        "keys": [name for name in about["keys"] if name in wide],
        "buffers": [],
        "wide": about["wide"],
    }


def _joined(mine, others):
    """``about_params`` of several ranks as one: this rank's own first."""
    for about in others:
        for name, known in about["parameters"].items():
            if mine["parameters"].setdefault(name, known)["shape"] != known["shape"]:
                raise ValueError(
                    f"parameter '{name}' has other shapes on several ranks: those that train different tensors must "
                    "give them different names in checkpoints (ds_expert_numbers)"
                )
        for key in ("keys", "buffers", "wide"):
            mine[key] = list(dict.fromkeys([*mine[key], *about[key]]))
        mine["groups"] = [list(dict.fromkeys([*a, *b])) for a, b in zip(mine["groups"], about["groups"])]
        mine["tied"] = {**about["tied"], **mine["tied"]}
    return mine


def _text(value):
    found = {"format": names.FORMAT, "version": names.VERSION, **value}
    return json.dumps(found, indent=1, allow_nan=False).encode() + b"\n"


def _check(tensors):
    for key, tensor in tensors.items():
        dtype = str(tensor.dtype).split(".")[-1]
        if torch.is_tensor(tensor) and not is_plain(tensor) or dtype not in SAFETENSORS_NAMES:
            raise NotPlain(
                f"{key.partition('/')[2]} is a tensor of {tensor.dtype}, {tensor.layout} on {tensor.device}, which a "
                "safetensors file cannot hold: make it dense and of a plain dtype, or set "
                '"checkpoint": {"writer": {"format": "torch"}}'
            )


def _checkpoint(run, client_state, others, encode, about):
    """The facts that are the same on all data-parallel ranks. ``about``: the parameters of all of them."""
    _, module_values, _, metadata = others
    progress = {"lr_scheduler": _scheduler_state(run.scheduler), **counters_of(run), "ds_version": __version__}
    return {
        "zero_stage": run.config.zero_optimization_stage,
        "pipeline": run.weights.layers is not None,
        "mp_rank": run.ranks.mp_rank,
        "ranks": list(run.ranks.dp_ranks),
        **_beside(run, about["wide"]),
        "parameters": about["parameters"],
        "tied": about["tied"],
        "groups": [
            {"names": called, "options": encode(options, where=f"optimizer.param_groups.{number}")}
            for number, (called, options) in enumerate(zip(about["groups"], run.options))
        ],
        "optimizer": encode(run.optimizer_values, where="optimizer"),
        "module": {
            "keys": about["keys"],
            "buffers": about["buffers"],
            "values": encode(module_values, where="module"),
            "metadata": encode(metadata, where="module metadata"),
        },
        "engine": {key: encode(value, where=key) for key, value in progress.items()},
        "ds_config": _described(run.ds_config),
        "client_state": encode(client_state),
    }


def _beside(run, wide):
    """The parameters ``wide``, of which ranks with another part of the model have elements, too, and these ranks."""
    others = sorted(set(range(run.ranks.world_size)) - set(run.ranks.dp_ranks)) if wide else []
    return {"beside": {"parameters": sorted(wide), "ranks": others}} if others else {}


def _parameters(run, exclude_frozen, named):
    """name -> what is known of a parameter without its values."""
    trained = run.trained()
    # Trained ones may belong to no module.
    params = [*((named(name), param) for name, param in kept_params(run, exclude_frozen)), *trained]
    found = {
        name: {"shape": list(saved_part(param)[1]), "dtype": str(param.dtype).removeprefix("torch."), "trained": False}
        for name, param in params
    }
    steps = run.states.steps() if run.states is not None else None
    for index, (name, _) in enumerate(trained):
        found[name]["trained"] = True
        if steps is not None:
            found[name]["step"] = steps[index]
    return found


def _scheduler_state(scheduler):
    """Schedulers of torch keep functions among their values: made again by the script, they need not be saved."""
    state = scheduler.state_dict() if hasattr(scheduler, "state_dict") else None
    of_torch = getattr(torch.optim.lr_scheduler, "LRScheduler", torch.optim.lr_scheduler._LRScheduler)
    if isinstance(scheduler, of_torch):
        return {key: value for key, value in state.items() if not isinstance(value, _FUNCTIONS)}
    return state


def _described(value):
    """A configuration as JSON: dtypes, groups and callables in it become text. It is there to be read by people."""
    if isinstance(value, dict):
        return {str(key): _described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(item) for item in value]
    is_json = value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))
    return value if is_json else str(value)
