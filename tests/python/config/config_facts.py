"""The published keys (config-schema.json) and ours (the JSON schema that csrc/config writes), side by side."""

import json
import pathlib

from deepspeed._native import _C

PUBLISHED = json.loads(pathlib.Path(__file__).with_name("config-schema.json").read_text(encoding="utf-8"))

# A bare mention of another section instead of keys of its own.
SAME_AS_ZERO = "same as zero_optimization"


def ours(root):
    return json.loads(_C.config.json_schema(root))


def merged(described):
    """A description without the alternative "auto" that validated sections have."""
    return {**described, **described["anyOf"][0]} if "anyOf" in described else described


def child(described, key):
    described = merged(described)
    if key in described.get("properties", {}):
        return merged(described["properties"][key])
    if (key == "*" or key.startswith("<")) and isinstance(described.get("additionalProperties"), dict):
        return merged(described["additionalProperties"])
    return None


def walk(keys, described, path=""):
    """Yields ``(path, published facts, our description or None)`` for every key below, sections included."""
    for key, facts in keys.items():
        here = f"{path}.{key}" if path else key
        mine = child(described, key)
        yield here, facts, mine
        if isinstance(facts.get("keys"), dict) and mine is not None:
            yield from walk(facts["keys"], mine, here)


def training_keys():
    return list(walk(PUBLISHED["keys"], ours("training")))


def inference_keys():
    """Keys of init_inference, then those of the ragged engine."""
    return list(walk(PUBLISHED["init_inference_config"]["keys"], ours("inference"))) + ragged_keys()


def ragged_keys():
    return list(walk(PUBLISHED["ragged_inference_config"]["keys"], ours("ragged_inference")))
