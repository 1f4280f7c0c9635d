"""Every published key is a Field with the published type, default, choices, strictness and names."""

import config_facts
import pytest

from deepspeed._native import _C
from deepspeed.config.model import ConfigSection, layout

# The published default is not a JSON constant, or says "the section's own defaults".
DEFAULTS = {
    "zero_optimization.leaf_module": "section",
    "compression_training.sparse_pruning.shared_parameters.schedule_offset_end": None,
    "expert_parallel.load_balance_coeff": None,
    "expert_parallel.expert_w3": None,
    "weight_quantization.q_type": "symmetric",
}
# Choices that are words about choices.
NOT_A_CHOICE = (
    "<any class name in torch.optim>",
    "<any class in torch.optim.lr_scheduler>",
    "<int>",
    "torch.dtype object",
)


# Keys that DeepSpeed does not have. Anything else beyond the published file is a mistake.
OWN_KEYS = {
    "autotuning.experiment_timeout",
    "elasticity.memory_copies",
    "elasticity.save_on_signal",
    "elasticity.snapshot_steps",
    "disable_python_gc",  # this and the next three: of DeepSpeed 0.19.8
    "keep_in_fp32_modules",
    "zero_optimization.compute_grad_norm",
    "zero_optimization.parameter_alignment",
    "tensor_parallel.vocab_parallel_lm_head",  # and the next one: of DeepSpeed 0.19.8
    "tensor_parallel.vocab_parallel_ce_backend",
    "tensor_parallel.split_sequence",
    "tensor_parallel.verify",
    "zero_optimization.audit_steps",
    "zero_optimization.cpu_offload_params",  # of older releases
    "zero_optimization.stage3_param_persitance_threshold",  # a misspelling in published files
    "zero_optimization.placement",
    "zero_optimization.placement.auto",
    "zero_optimization.placement.device_gb",
    "zero_optimization.placement.host_gb",
    "zero_optimization.placement.nvme_gb",
    "comm",
    "pipeline.schedule",
    "pipeline.memory_limit",
    "pipeline.use_reentrant",
    "sequence_parallel",
    "sequence_parallel.chunk",
    "sequence_parallel.folder",
    "sequence_parallel.method",
    "sequence_parallel.offload",
    "sequence_parallel.size",
    "sequence_parallel.tile_loss",
    "sequence_parallel.tile_mlp",
    "comm.timeout",
    "monitors",
    "report",
    "report.path",
    "moe",
    "moe.aux_loss_coeff",
    "moe.bias_update_rate",
    "moe.idle_steps",
    "moe.overlap_chunks",
    "checkpoint.async",
    "checkpoint.engine",
    "checkpoint.host_cache_size",
    "checkpoint.keep_last",
    "checkpoint.write_in_place",
    "checkpoint.trust_pickles",
    "checkpoint.verify_on_load",
    "checkpoint.writer.format",
    *("step_log", "step_log.enabled", "step_log.file", "step_log.peak_tflops"),
    *("postmortem", "postmortem.on", "postmortem.dir", "postmortem.keep", "postmortem.max_bytes"),
    "postmortem.spike_factor",
    "max_train_tokens",
    "curriculum_learning.truncate",
    *("trace", "trace.path", "trace.start_step", "trace.steps"),
}


def all_keys():
    return config_facts.training_keys() + config_facts.inference_keys()


def test_the_published_file_has_531_training_and_61_or_more_inference_keys():
    assert len(config_facts.training_keys()) == 531 and len(config_facts.inference_keys()) >= 61


def test_every_key_is_known():
    assert [path for path, _, mine in all_keys() if mine is None] == []


def test_keys_of_our_own_are_listed():
    """Every key that we know is published, under that name or as an alias, or listed above."""
    published = {
        path[: len(path) - len(name)] + key
        for path, facts, _ in config_facts.training_keys()
        for name in [path.rpartition(".")[2]]
        for key in [name, *facts.get("also_accepted_as", []), *facts.get("aliases", [])]
    }
    assert {path for path in _dotted(layout("training"), named=True) if path not in published} == OWN_KEYS


def test_defaults():
    wrong = []
    for path, facts, mine in all_keys():
        if "default" not in facts:
            continue
        expected = DEFAULTS.get(path, facts["default"])
        if expected in ({}, "section", "section defaults") and "properties" in mine:
            expected = mine["default"]
            assert isinstance(expected, dict)
        if mine["default"] != expected or isinstance(mine["default"], bool) != isinstance(expected, bool):
            wrong.append((path, expected, mine["default"]))
    assert wrong == []


OTHER_TYPES = {"fp16.min_loss_scale": "float"}  # published as int; scales below 1 are numbers like any other
JSON_TYPES = {
    "int": {"integer"},
    "float": {"number"},
    "bool": {"boolean"},
    "str": {"string"},
    "object": {"object"},
    "list": {"array"},
    "Dict": {"object"},
}


def test_types():
    wrong = []
    for path, facts, mine in all_keys():
        told = OTHER_TYPES.get(path, facts["type"])
        told = told if told != facts["type"] or not told.startswith("list[") else told.split("[")[0]
        expected = JSON_TYPES.get(told)
        python_object = facts["type"] == "object" and "keys" not in facts and facts.get("default") is None
        if facts["type"].endswith("| str") or expected is None or python_object or "type" not in mine:
            continue
        types = set(mine["type"]) if isinstance(mine["type"], list) else {mine["type"]}
        if not expected <= types:
            wrong.append((path, facts["type"], types))
    assert wrong == []


def test_choices():
    wrong = []
    for path, facts, mine in all_keys():
        published = [item for item in facts.get("allowed", []) if item is not None and item not in NOT_A_CHOICE]
        known = mine.get("enum") or mine.get("examples") or mine.get("items", {}).get("enum") or []
        if published and published != ["auto"] and published != [item for item in known if item is not None]:
            wrong.append((path, published, known))
    assert wrong == []


def test_bounds():
    words = {"ge": "minimum", ">=": "minimum", "le": "maximum", ">": "exclusiveMinimum"}
    seen = 0
    for path, facts, mine in all_keys():
        for constraint in facts.get("constraints", []):
            parts = constraint.split()
            if len(parts) == 2 and parts[0] in words and parts[1].replace(".", "").isdigit():
                seen += 1
                assert mine.get(words[parts[0]]) == float(parts[1]), (path, constraint)
    assert seen >= 25


def test_strict_sections_refuse_unknown_keys_and_drop_auto():
    strict = [(path, mine) for path, facts, mine in all_keys() if facts.get("strict_keys")]
    assert len(strict) >= 25
    assert [path for path, mine in strict if mine["additionalProperties"] or not mine["x-ds-validated"]] == []


def test_other_names_and_deprecations():
    roots = {path: root for root in ("training", "inference") for path in _dotted(layout(root))}
    for path, facts, mine in all_keys():
        names = facts.get("also_accepted_as", []) + facts.get("aliases", [])
        assert sorted(names) == sorted(mine.get("x-ds-aliases", [])), path
        assert bool(facts.get("deprecated")) == bool(mine.get("deprecated")), path
        if "value_forwarded" in facts:
            assert facts["value_forwarded"] == mine["x-ds-value-forwarded"], path
        if "replaced_by" in facts and " or " not in facts["replaced_by"]:
            section = path.rpartition(".")[0]
            for name in (facts["replaced_by"], mine["x-ds-replaced-by"]):
                assert (f"{section}.{name}" if section else name) in roots, (path, name)


def _dotted(fields, prefix="", named=False):
    """Paths of all keys, under each of their names; ``named``: under the first one only."""
    for key, facts in fields.items():
        for name in [key] if named else [key, *facts["aliases"]]:
            yield prefix + name
            yield from _dotted(facts["fields"] or {}, prefix + name + ".", named)


RAGGED = len(list(config_facts.ragged_keys()))
PROGRAM_OBJECT = object()  # stands for a process group, an mpu


def _other_value(facts, mine, path):
    """A legal value that is not the default, as far as the facts tell."""
    default = mine.get("default")
    choices = mine.get("enum") or mine.get("examples")
    if choices:
        others = [item for item in choices if item not in (default, None)]
        return others[0] if others else default
    if "type" not in mine:
        return "other" if "str" in facts["type"].lower() or "dtype" in facts["type"] else PROGRAM_OBJECT
    types = mine["type"]
    if "boolean" in types:
        return not default
    if "integer" in types:
        return 7 if default != 7 else 8
    if "number" in types:
        return 0.5 if default != 0.5 else 0.25
    if "array" in types:
        items = mine.get("items", {})
        if "enum" in items:
            return items["enum"][:1]
        if "properties" in items:  # a list of sections comes back with their defaults filled in
            return [{key: described["default"] for key, described in items["properties"].items()}]
        return ["a.b"] if not items or "string" in items.get("type", []) else [3]
    if "object" in types:
        return {"some": 1}
    return "other"


@pytest.mark.parametrize("root", ["training", "inference", "ragged_inference"])
def test_every_key_round_trips(root):
    """A value given for any key comes back under that key, and only there."""
    published = {
        "training": config_facts.training_keys,
        "inference": lambda: config_facts.inference_keys()[:-RAGGED],
        "ragged_inference": lambda: config_facts.inference_keys()[-RAGGED:],
    }[root]()
    tried = 0
    for path, facts, mine in published:
        if "properties" in mine or isinstance(facts.get("keys"), dict) or "*" in path.split("."):
            continue
        value = _other_value(facts, mine, path)
        given = value
        for name in reversed(path.split(".")):
            given = {name: given}
        native = _C.config.resolve_dict(given, root=root)
        errors = [issue for issue in native.issues() if issue["severity"] == "error"]
        broken = [issue for issue in errors if issue["code"] not in ("not_built", "rule", "missing_key")]
        assert broken == [] or path == "quantize_training.eigenvalue.enabled", (path, value, broken)
        found = native.values()
        for name in path.split("."):
            found = found[name]
        assert found == value, path
        tried += 1
    assert tried >= {"training": 420, "inference": 40, "ragged_inference": 5}[root]


def test_sections_of_the_layout_make_section_objects():
    values = _C.config.resolve_dict({}).values()
    for key, facts in layout("training").items():
        if facts["fields"] and isinstance(values[key], dict):
            assert ConfigSection.from_values(values[key], facts["fields"]).model_dump() == values[key]
