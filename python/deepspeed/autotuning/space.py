"""The configurations to choose from: the user's, with a value of each range."""

import collections
import copy
import itertools
import json
import re

from deepspeed.autotuning.settings import BATCH, GAS, MBS, ZERO, key_schema
from deepspeed.autotuning.utils import drop_path, get_path, set_path

STAGE = f"{ZERO}.stage"
STAGES = (0, 1, 2, 3)
# Keys of zero_optimization by the first letters of their names, and the stages at which they change something.
_WORK_AT = (("stage3_", STAGES[3:]), ("offload_param", STAGES[3:]), ("", STAGES[1:]))
# With fast: false the best configurations are tried with these values, too, where they change something.
_MORE = {
    f"{ZERO}.overlap_comm": [True, False],
    f"{ZERO}.reduce_bucket_size": [500_000_000, 50_000_000],
    f"{ZERO}.allgather_bucket_size": [500_000_000, 50_000_000],
    f"{ZERO}.stage3_prefetch_bucket_size": [50_000_000, 5_000_000],
    f"{ZERO}.stage3_param_persistence_threshold": [100_000, 1_000_000],
    f"{ZERO}.offload_optimizer": [None, {"device": "cpu"}],
    f"{ZERO}.offload_param": [None, {"device": "cpu"}],
    "pipeline.activation_checkpoint_interval": [0, 1],
    "activation_checkpointing.cpu_checkpointing": [False, True],
}


def _leaves(config, above=""):
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _choices(path, value):
    """The values of the range that ``value`` is, or None. A key that takes lists has no ranges."""
    if not isinstance(value, list) and value != "all":
        return None
    types, field = key_schema(path)
    if not types or "array" in types:
        return None
    if isinstance(value, list):
        if not value:
            raise ValueError(f"{path} is an empty list: name the values to try")
        return value
    choices = field.get("enum") or ([False, True] if "boolean" in types else None)
    if choices is None and "string" not in types:
        raise ValueError(f'{path} is "all", and it takes any {types[0]}: list the values to try')
    return choices


def base_and_ranges(settings):
    """``(configuration, {path: values})``: what is fixed, and what the user leaves open. "auto" becomes the script's
    argument that is mapped to the key; without one keys of ``zero_optimization`` get their defaults."""
    base, ranges = copy.deepcopy(settings.user_config), {}
    base.pop("autotuning", None)
    if isinstance(base.get(ZERO), bool):
        base[ZERO] = {"stage": STAGES[base[ZERO]]}
    for path, value in list(_leaves(base)):
        if path in (MBS, GAS, BATCH, STAGE):
            continue
        choices, mapped = _choices(path, value), settings.get_val_from_user_args(path)
        if choices is not None:
            ranges[path] = choices
            drop_path(base, path)
        elif value == "auto" and mapped is not None:
            set_path(base, path, _number(mapped))
        elif value == "auto" and path.startswith(f"{ZERO}."):
            drop_path(base, path)
    stage = get_path(base, STAGE, "all")
    ranges[STAGE] = _choices(STAGE, stage) or (list(STAGES) if stage == "auto" else [stage])
    sizes, gas = base.pop(MBS, "auto"), base.pop(GAS, "auto")
    if sizes not in ("auto", "all"):
        ranges[MBS] = sizes if isinstance(sizes, list) else [sizes]
    ranges[GAS] = gas if isinstance(gas, list) else [settings.get_gas_from_user_config()]
    if base.get(BATCH) == "auto":
        del base[BATCH]
    return base, ranges


def more_ranges(config):
    """The values that ``fast: false`` tries besides: {path: values}, the value of ``config`` first."""
    found = {}
    for path, values in _MORE.items():
        section, key = path.split(".")
        if section != ZERO and section not in config or key in (config.get(section) or {}):
            continue  # another kind of model, or the user's own value
        if section != ZERO or works_at(key, get_path(config, STAGE)):
            found[path] = values
    return found


def works_at(key, stage):
    """Whether a key of ``zero_optimization`` changes something at that stage."""
    return key == "stage" or stage in next(stages for start, stages in _WORK_AT if key.startswith(start))


def candidates(base, ranges, copies, mapped=()):
    """``{name: configuration}`` of all combinations. ``copies``: of the model, so that a ``train_batch_size`` of the
    user stays: accumulation steps follow from it, and what does not divide it is left out."""
    found, batch = {}, base.get(BATCH)
    short = _abbreviations(ranges)
    for values in itertools.product(*ranges.values()):
        chosen, config = dict(zip(ranges, values, strict=True)), copy.deepcopy(base)
        stage, size = chosen[STAGE], chosen[MBS]
        if batch is not None:
            if batch % (size * copies):
                continue
            chosen[GAS] = batch // (size * copies)
        rest = ""
        for path, value in chosen.items():
            section, _, key = path.partition(".")
            if section == ZERO and not works_at(key, stage):
                continue
            set_path(config, path, value)
            if path in short:
                rest += f"_{short[path]}{re.sub(r'[^0-9A-Za-z.+-]', '', json.dumps(value))}"
        if BATCH in mapped:
            config[BATCH] = size * chosen[GAS] * copies
        found[f"z{stage}_gas{chosen[GAS]}_tmbspg{size}{rest}"] = config
    return found


def _abbreviations(ranges):
    """The first letters of each path beside stage, micro-batch and accumulation; all of it where two have the same."""
    full = {path: path.removeprefix(f"{ZERO}.").replace(".", "_") for path in ranges if path not in (STAGE, MBS, GAS)}
    short = {path: "".join(word[0] for word in name.split("_") if word) for path, name in full.items()}
    times = collections.Counter(short.values())
    return {path: short[path] if times[short[path]] == 1 else full[path] for path in full}


def _number(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def features(config, ranges):
    """``{path: value}`` of what differs between configurations; values as text but for numbers."""
    found = {path: get_path(config, path) for path in ranges}
    return {key: one if isinstance(one, (int, float)) else json.dumps(one) for key, one in found.items()}
