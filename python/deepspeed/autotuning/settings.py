"""The settings of the user: the configuration among the arguments of the script, and its section ``autotuning``."""

import copy
import functools
import json
import subprocess
import sys

from deepspeed.autotuning.utils import get_path, get_val_by_key, read_config
from deepspeed.registry import nearest

MBS, GAS, BATCH = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
ZERO = "zero_optimization"
# Arguments of scripts that say what the tuner changes: those of the Hugging Face Trainer, and names of keys.
_TUNED_ARGUMENTS = {"per_device_train_batch_size": MBS, MBS: MBS, GAS: GAS, BATCH: BATCH}
MINIMISED = ("latency", "forward", "step")  # the other metrics are to be large
_KINDS = {"boolean": bool, "integer": int, "number": (int, float), "string": str, "object": dict, "null": type(None)}


def without_secrets(config, known):
    """A copy of a configuration without the keys that its schema calls secret (``writeOnly``)."""
    if not isinstance(config, dict):
        return config
    rows = {key: known.get("properties", {}).get(key, {}) for key in config}
    return {key: without_secrets(value, rows[key]) for key, value in config.items() if not rows[key].get("writeOnly")}


@functools.cache
def schema():
    """The JSON schema of all keys, from the program ``ds_config``: this process has no torch."""
    run = subprocess.run([sys.executable, "-m", "deepspeed.config.cli", "schema"], capture_output=True, text=True)
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"autotuning: the program ds_config, which knows all keys, does not run here: {last}")
    return json.loads(run.stdout)


def key_schema(path):
    """``(types, schema)`` of the key ``path``; ``([], {})`` of one that is not known."""
    found = schema()
    for key in path.split("."):
        every = [found, *found.get("anyOf", ())]
        found = next((one["properties"][key] for one in every if key in one.get("properties", {})), {})
    flat = {**found, **next((one for one in found.get("anyOf", ()) if "type" in one), {})}
    return flat.get("type", []), flat


def section_of(config):
    """The section ``autotuning`` with its defaults. ValueError names a key with a wrong value, and what would be
    right."""
    given = config.get("autotuning") or {}
    fields = schema()["properties"]["autotuning"]["properties"]
    if not isinstance(given, dict):
        raise ValueError(f'autotuning: {given!r} is not a section: write "autotuning": {{"enabled": true}}')
    for key, value in given.items():
        if key not in fields:
            raise ValueError(f"autotuning.{key} is not a key of the configuration.{nearest(key, fields)}")
        types, field = key_schema(f"autotuning.{key}")
        fits = any(isinstance(value, _KINDS[kind]) for kind in types) and ("boolean" in types) >= isinstance(
            value, bool
        )
        low, above = field.get("minimum", value), field.get("exclusiveMinimum")
        if field.get("enum") and value not in field["enum"]:
            raise ValueError(
                f"autotuning.{key} is {value!r}; it is one of: {', '.join(field['enum'])}."
                f"{nearest(value, field['enum'])}"
            )
        if not fits or (
            value is not None and (low > value if "minimum" in field else above is not None and value <= above)
        ):
            what = " or ".join(types) + (f" above {above:g}" if above is not None else "")
            raise ValueError(f"autotuning.{key} is {value!r}; it is a value of the kind {what}.")
    section = {**{key: field.get("default") for key, field in fields.items()}, **copy.deepcopy(given)}
    if given.get("enabled") is False:
        raise ValueError(
            "autotuning.enabled is false, and the launcher got --autotuning: set it to true, or leave that out."
        )
    if section["end_profile_step"] <= section["start_profile_step"]:
        raise ValueError("autotuning.end_profile_step must be above start_profile_step: no step would be measured.")
    for key in ("results_dir", "exps_dir"):
        if not section[key]:
            raise ValueError(f"autotuning.{key} is empty: name a folder, or leave it out.")
    return section


def argument(words, *flags):
    """``(index, prefix, value)`` of the first of ``flags`` that is among ``words`` with a value, behind a blank or "=";
    None without one."""
    for flag in flags:
        for index, word in enumerate(words):
            if word == flag and index + 1 < len(words) and not str(words[index + 1]).startswith("--"):
                return index + 1, "", words[index + 1]
            if str(word).startswith(f"{flag}="):
                return index, f"{flag}=", word[len(flag) + 1 :]
    return None


def config_argument(user_args):
    """``(index, prefix, value)`` of the configuration in the arguments of the script."""
    found = argument(user_args, "--deepspeed_config", "--deepspeed")
    if found is None:
        raise ValueError(
            "autotuning needs the configuration among the arguments of the script, to change it: --deepspeed_config "
            "FILE, or --deepspeed FILE"
        )
    return found


class TuningSettings:
    """The user's side of the tuner: ``args`` of the launcher, the configuration and its section."""

    def __init__(self, args, active_resources):
        self.args = args
        # Experiments write their configurations to files. Comet finds its key in COMET_API_KEY.
        self.user_config = without_secrets(read_config(config_argument(args.user_args)[2]), schema())
        self.section = section_of(self.user_config)
        self.arg_mappings = {
            key.strip(): str(flag).strip() for key, flag in (self.section["arg_mappings"] or {}).items()
        }
        self.exp_num_nodes = args.num_nodes if args.num_nodes > 0 else len(active_resources)
        self.exp_num_gpus = args.num_gpus if args.num_gpus > 0 else min(map(len, active_resources.values()))
        self._check_arguments()

    def _check_arguments(self):
        known = schema()["properties"]
        given = {key: value for key, value in self.user_config.items() if key != "autotuning"}
        for key, flag in self.arg_mappings.items():
            if key.split(".")[0] not in known and get_val_by_key(given, key) is None:
                raise ValueError(
                    f"autotuning.arg_mappings: {key!r} is not a key of the configuration.{nearest(key, known)}"
                )
            if not flag.startswith("-"):
                raise ValueError(
                    f"autotuning.arg_mappings: {key!r} is mapped to {flag!r}, which is not an argument of the script: "
                    f"write --{flag}"
                )
        mapped = set(self.arg_mappings.values())
        for word in map(str, self.args.user_args):
            flag = word.split("=")[0]
            key = _TUNED_ARGUMENTS.get(flag.lstrip("-").replace("-", "_")) if flag.startswith("--") else None
            if key and flag not in mapped:
                raise ValueError(
                    f"the script gets {flag}, and the tuner changes {key}: say so by autotuning.arg_mappings: "
                    f'{{"{key}": "{flag}"}}, or leave the argument out'
                )

    def metric(self):
        return self.section["metric"]

    def goodness(self, value):
        """Larger is better, whatever the metric."""
        return -value if self.metric() in MINIMISED else value

    def fast_enabled(self):
        return self.section["fast"]

    def max_train_batch_size(self):
        return self.section["max_train_batch_size"]

    def mp_size(self):
        return self.section["mp_size"]

    def copies(self):
        """The number of copies of the model, each of which gets micro-batches of its own."""
        return max(1, self.exp_num_nodes * self.exp_num_gpus // self.mp_size())

    def max_train_micro_batch_size_per_gpu(self):
        """The largest micro-batch that the user allows, also by ``max_train_batch_size``."""
        largest = self.section["max_train_micro_batch_size_per_gpu"]
        if self.max_train_batch_size() is None:
            return largest
        return min(largest, max(1, self.max_train_batch_size() // (self.copies() * self.get_gas_from_user_config())))

    def min_train_micro_batch_size_per_gpu(self):
        """The smallest one, also by ``min_train_batch_size``."""
        parts = self.copies() * self.get_gas_from_user_config()
        return max(
            self.section["min_train_micro_batch_size_per_gpu"], -(-self.section["min_train_batch_size"] // parts)
        )

    def num_tuning_micro_batch_sizes(self):
        return self.section["num_tuning_micro_batch_sizes"]

    def fp16_enabled(self):
        return bool(get_path(self.user_config, "fp16.enabled", False))

    def get_gas_from_user_config(self):
        """The accumulation steps of the configuration; of the script's arguments where that says "auto"; else 1. Of a
        range the smallest."""
        gas = self.user_config.get(GAS, 1)
        if gas == "auto":
            gas = self.get_val_from_user_args(GAS) or 1
        gas = min(gas) if isinstance(gas, list) and gas else gas
        if isinstance(gas, bool) or not str(gas).isdigit() or int(gas) < 1:
            raise ValueError(f'{GAS} is {gas!r}; it is a number from 1 on, a list of such numbers, or "auto".')
        return int(gas)

    def get_val_from_user_args(self, ds_name):
        """The script's argument that ``arg_mappings`` names for the key ``ds_name``, as text; None without one."""
        found = argument(self.args.user_args, *[flag for key, flag in self.arg_mappings.items() if key == ds_name])
        return str(found[2]) if found else None
