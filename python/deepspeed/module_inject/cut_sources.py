"""The sources that say how layers are cut, of which the first one that applies decides.

1. ``tensor_parallel.partition_config``, rules of the user;
2. ``tensor_parallel.preset_model``, rules of a known model;
3. the plan that a model of transformers brings along;
4. ``injection_policy`` or ``injection_policy_tuple``: names of the layers whose results are summed, the other linear
   layers of their blocks are cut along their outputs;
5. none: the analysis of what the model computes.
"""

import dataclasses

from deepspeed.module_inject.autotp_config import (
    AutoTPConfig,
    AutoTPPresets,
    PartitionType,
    TPLayerSpec,
    merge_autotp_configs,
)
from deepspeed.module_inject.block_twin import is_linear, stays_whole
from deepspeed.module_inject.tp_plan_converter import TPPlanConverter, _get_hf_tp_plan

ANALYSIS = "the analysis of the model"


@dataclasses.dataclass
class Source:
    """``name``: for messages. ``rules``: an ``AutoTPConfig``; None: the analysis decides. ``policy``: ``(block class,
    its name, or None for any; ends of names of layers)`` pairs. ``by_user``: a script wrote it, so that a difference
    is a warning. ``complete``: this many rules, of which one that fits nothing is an error."""

    name: str = ANALYSIS
    rules: AutoTPConfig = None
    policy: list = None
    by_user: bool = False
    complete: int = 0


def source_of(model, settings=None, policy=None):
    """The ``Source`` for a model. ``settings``: the section ``tensor_parallel``, or an ``AutoTPConfig``; ``policy``:
    the argument ``injection_policy`` of ``init_inference``, a dict of block classes."""
    rules = settings if isinstance(settings, AutoTPConfig) else getattr(settings, "partition_config", None)
    if rules is not None:
        made = rules if isinstance(rules, AutoTPConfig) else AutoTPConfig.from_dict(rules.model_dump())
        if made.layer_specs or made.strict_mode:
            own = len(made.layer_specs)
            if made.use_default_specs and getattr(settings, "preset_model", None) is not None:
                made = merge_autotp_configs(AutoTPPresets.get_preset(settings.preset_model), made)
            return Source("tensor_parallel.partition_config", made, by_user=True, complete=own)
    preset = getattr(settings, "preset_model", None)
    if preset is not None:
        return Source(f"tensor_parallel.preset_model = {preset}", AutoTPPresets.get_preset(preset))
    plan = _get_hf_tp_plan(model)
    specs = TPPlanConverter.convert(plan) if plan else None
    if specs:
        return Source("the tensor-parallel plan of the model", AutoTPConfig(layer_specs=specs))
    names = getattr(settings, "injection_policy_tuple", None)
    if policy or names:
        pairs = [*(policy or {}).items(), *([(None, names)] if names else [])]
        return Source("injection_policy", policy=[(kind, _names(ends)) for kind, ends in pairs], by_user=True)
    return Source()


def _names(ends):
    return (ends,) if isinstance(ends, str) else tuple(ends)


def roles_in(source, model, blocks):
    """``{full name of a linear layer or a parameter's module: TPLayerSpec}`` by a source. ValueError where strict_mode
    is on and a layer has no rule, where a rule of the user fits nothing, and where a preset does."""
    if source.policy is not None:
        return _roles_of_policy(source, blocks)
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    found, used = {}, set()
    for name, module in model.named_modules():
        if getattr(module, "weight", None) is None or not hasattr(module.weight, "shape"):
            continue
        spec = next((one for one in source.rules.layer_specs if one.matches(f"{name}.weight", model_type)), None)
        if spec is not None:
            used.add(id(spec))
            if not stays_whole(module):
                found[name] = spec
        elif source.rules.strict_mode and is_linear(module):
            source.rules.find_matching_spec(f"{name}.weight", model_type)
    unused = [one for one in source.rules.layer_specs if id(one) not in used and _is_for(one, model_type)]
    unused = unused if not found else [one for one in source.rules.layer_specs[: source.complete] if one in unused]
    if unused:
        patterns = [pattern for one in unused for pattern in one.patterns]
        raise ValueError(
            f"{source.name}: no parameter of {type(model).__name__} fits the patterns {patterns}: correct or remove "
            "them. A pattern is a regular expression for a whole name such as 'layers.0.mlp.up_proj.weight'"
        )
    return found


def _is_for(spec, model_type):
    return not spec.model_types or str(model_type).lower() in [one.lower() for one in spec.model_types]


def _roles_of_policy(source, blocks):
    found = {}
    for name, block in blocks.items():
        ends = [
            end
            for kind, names in source.policy
            if kind is None or kind == type(block).__name__ or isinstance(kind, type) and isinstance(block, kind)
            for end in names
        ]
        layers = {one: module for one, module in block.named_modules() if is_linear(module)}
        rows = [one for one in layers if any(f".{one}".endswith(f".{end.lstrip('.')}") for end in ends)]
        for one in layers if rows else ():
            kind = PartitionType.ROW if one in rows else PartitionType.COLUMN
            found[f"{name}.{one}".lstrip(".")] = TPLayerSpec([], kind)
    if not found:
        wanted = [(getattr(kind, "__name__", kind), names) for kind, names in source.policy]
        raise ValueError(
            f"injection_policy: no block of the model has a layer of {wanted}. It maps a class of blocks to the "
            "ends of the names of its linear layers whose results are summed: {T5Block: ('SelfAttention.o',)}"
        )
    return found
