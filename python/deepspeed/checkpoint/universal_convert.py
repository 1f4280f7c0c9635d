"""The steps of a conversion to a universal checkpoint. Each handles one parameter and holds nothing of the others."""

import os

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import storage
from deepspeed.checkpoint.saved_universal import OPTIMIZER_STATE, STEP, ZERO_FOLDER
from deepspeed.checkpoint.universal_shards import merge_zero_shards, write_shard
from deepspeed.checkpoint.universal_slices import merge_slices
from deepspeed.checkpoint.universal_source import Source
from deepspeed.zero.saved_state import read_into

TEMP_FOLDER = "tmp"


class Conversion:
    """One conversion. ``input_folder``: that of a tag; ``output_folder``: that of the universal checkpoint."""

    def __init__(self, input_folder, output_folder, inject=False):
        self.arguments = {"input_folder": input_folder, "output_folder": output_folder, "inject": inject}
        self.source = Source(input_folder, inject)
        self.temp_dir = os.path.join(output_folder, TEMP_FOLDER)
        self.zero_dir = os.path.join(output_folder, ZERO_FOLDER)

    def tasks(self):
        """``[name of a trained parameter, pipeline stage]`` of all of them."""
        return [[name, stage] for name, stage in self.source.parameters().items()]

    def extract(self, task):
        """Writes the shards of all states of a parameter, those of every rank that saved, below ``tmp/``."""
        name, stage = task
        for tp in range(self.source.tp_degree):
            saved = self.source.saved(stage * self.source.tp_degree + tp)
            for state in [keys.FP32_WEIGHT_KEY, *saved.state_names()]:
                for number, (_, numel, reader) in enumerate(saved.pieces(name, state)):
                    write_shard(self.temp_dir, name, tp, state, number, reader.read_range(0, numel))
            for key, value in saved.scalars(name).items():
                if torch.is_tensor(value) or isinstance(value, (int, float)):
                    write_shard(self.temp_dir, name, tp, key, 0, value)

    def merge(self, task):
        """Joins them into the parameter's files. Returns the patterns that this parameter matches."""
        name, stage = task
        return sorted(merge_parameter(
            self.source.rules, self.zero_dir, self.temp_dir, name, self.source.slice_shapes(name, stage)
        ))  # fmt: skip

    def frozen(self, task):
        """Writes a parameter that is not trained and is cut among the ranks that saved (stage 3), in its own dtype."""
        (name,) = task
        saved = self.source.saved(0)
        pieces = saved.frozen_pieces(name)
        first = pieces[0][2].read_range(0, 1) if pieces else torch.zeros(0)
        whole = torch.empty(saved.frozen_shapes()[name], dtype=first.dtype)
        if read_into(whole, pieces, 0) != whole.numel():
            raise ValueError(f"{self.source.folder} has not all elements of the frozen parameter '{name}'")
        _save_state(os.path.join(self.zero_dir, name), keys.FP32_WEIGHT_KEY, whole, {})

    def frozen_tasks(self):
        saved = self.source.saved(0)
        return [[name] for name in getattr(saved, "frozen_shapes", dict)() if saved.frozen_pieces(name)]


    def common(self):
        """Writes what belongs to the optimizer as a whole."""
        saved = self.source.saved(0)
        groups = [
            {**{key: value for key, value in group.items() if key != "names"}, "params": [index]}
            for index, group in enumerate(saved.param_groups())
        ]
        state = {**saved.extra(), keys.ZERO_STAGE: saved.zero_stage, keys.PARAM_GROUPS: groups}
        os.makedirs(self.zero_dir, exist_ok=True)
        storage.write(storage.compact(state), os.path.join(self.zero_dir, OPTIMIZER_STATE))


def _save_state(folder, state, value, hints):
    os.makedirs(folder, exist_ok=True)
    storage.write({keys.PARAM: storage.compact(value), **hints}, os.path.join(folder, f"{state}.pt"))


def merge_parameter(rules, zero_dir, temp_dir, name, slice_shapes):
    """Joins the shards of a parameter below ``temp_dir``: of its ranks, then of its tensor-parallel slices.

    Returns the patterns of the rules that its name matches. Raises ValueError when it has none of the fp32 values.
    """
    rules.used = set()
    base, folder = os.path.join(temp_dir, name), os.path.join(zero_dir, name)
    count = len(slice_shapes)
    if not merge_zero_shards(base, keys.FP32_WEIGHT_KEY, count, slice_shapes):
        raise ValueError(f"there are no shards of parameter '{name}' below {temp_dir}")
    for state in _states_below(base):
        slices = merge_zero_shards(base, state, count, slice_shapes)
        if state == STEP:
            os.makedirs(folder, exist_ok=True)
            storage.write(slices[0], os.path.join(folder, f"{STEP}.pt"))
        elif not torch.is_tensor(slices[0]) or not slices[0].dim():
            _save_state(folder, state, torch.as_tensor(slices[0]), {})
        else:
            whole, hints = merge_slices(name, slices, rules)
            _save_state(folder, state, whole, hints)
    return set(rules.used)


def _states_below(base):
    """Names of the states of which there are shards, whichever tensor-parallel rank has them."""
    found = {
        file.rsplit(".", 1)[0]
        for tp in os.listdir(base)
        if os.path.isdir(os.path.join(base, tp))
        for file in os.listdir(os.path.join(base, tp))
        if file.rsplit(".", 1)[-1].isdigit()
    }
    return sorted(found)
