"""The source of a universal checkpoint, the steps of a conversion, and the threads that share them."""

import concurrent.futures
import itertools
import os

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.autoep_universal import (
    layers_of,
    merge_zero_shards,
    metadata_of,
    save_state,
    states_below,
    write_shard,
)
from deepspeed.checkpoint.layouts import names, storage
from deepspeed.checkpoint.layouts.names import OPTIMIZER_STATE, STEP, TEMP_FOLDER, ZERO_FOLDER, shard_path, state_path
from deepspeed.checkpoint.layouts.open_saved import open_run, open_saved, pipeline_degrees
from deepspeed.checkpoint.layouts.saved_state import eager, plain
from deepspeed.checkpoint.layouts.saved_universal import ParallelRules, merge_slices
from deepspeed.checkpoint.reshape_3d_utils import get_model_3d_descriptor
from deepspeed.checkpoint.reshape_utils import get_zero_files
from deepspeed.checkpoint.write import file_writer
from deepspeed.log import logger

# ---- universal source ----------------------------------------------------------------------------------------------
# A checkpoint folder as the source of a universal one: its grid of ranks, its parameters, its rules.


_IN_EVERY_STAGE = keys.PIPELINE_REPLICATED_PARAMETER_PATTERNS  # tied embeddings: the first stage's are taken


class Source:
    """``folder``: one tag of a checkpoint of any ZeRO stage. ``inject``: missing ``universal_checkpoint_info`` counts
    as an empty one. Opens files when they are asked for, and keeps tensors in them."""

    def __init__(self, folder, inject=False):
        self.folder, self.inject = folder, inject
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"there is no checkpoint folder {folder}: --input_folder is that of one tag")
        self._saved, self._is_pipeline = {}, pipeline_degrees(folder) is not None
        if self._is_pipeline:  # names mean the same in all stages
            joined = open_run(folder)
            self._saved = {0: joined} if joined.is_whole else {}
        self.pp_degree, self.tp_degree = (1, 1) if self._saved else self._degrees()
        if not self.saved(0).shapes:
            raise ValueError(
                f"{folder} has no optimizer states (files *{keys.OPTIM_FILE_SUFFIX}), so there are no fp32 weights to "
                "convert: it was saved without an optimizer, or the files are gone"
            )
        self.zero_stage = self.saved(0).zero_stage
        is_joined = self._is_pipeline and self.pp_degree * self.tp_degree == 1  # its slices are, too
        tables = self.saved(0).model.get(keys.TENSOR_CUTS) or {}
        self.cuts_frozen, self.tables = bool(tables), {} if is_joined else tables
        self.info = None if is_joined else self._find_info()
        if self.info is None and not inject and self.pp_degree * self.tp_degree > 1:
            raise ValueError(
                f"{folder} is of {self.pp_degree} pipeline stages of {self.tp_degree} tensor-parallel ranks, and its "
                f"model files have no '{keys.UNIVERSAL_CHECKPOINT_INFO}' that says how slices become whole parameters. "
                "Save it with that key in client_state, or pass --inject_missing_state if every parameter is cut along "
                "dimension 0"
            )
        if self.info is None and inject:
            logger.warning(f"{folder} has no '{keys.UNIVERSAL_CHECKPOINT_INFO}': an empty one is taken")
        self.rules = ParallelRules(self.info, self.tables)
        self._refuse_experts()

    def _degrees(self):
        """Pipeline and tensor-parallel degrees: what the model file says, if that fits the number of files; else what
        their names say."""
        if names.is_native(self.folder):
            pp_degree, tp_degree = 1, names.mp_size(self.folder)
        else:
            grid = get_model_3d_descriptor(self.folder)
            pp_degree, tp_degree = grid.pp_degree, grid.tp_degree
        said = self.saved(0).model.get(keys.CHECKPOINT_PARALLEL_DIMS) or {}
        pp, tp = said.get(keys.CHECKPOINT_PP_DEGREE, pp_degree), said.get(keys.CHECKPOINT_TP_DEGREE, tp_degree)
        return (pp, tp) if pp * tp == pp_degree * tp_degree else (pp_degree, tp_degree)

    def saved(self, mp_rank):
        """The ``SavedState`` of a model-parallel rank."""
        if mp_rank not in self._saved:
            plain = not names.is_native(self.folder) and not get_zero_files(self.folder)
            self._saved[mp_rank] = self._open_plain(mp_rank) if plain else open_saved(self.folder, mp_rank)
        return self._saved[mp_rank]

    def of_stage(self, stage):
        """The same of each tensor-parallel rank of a pipeline stage."""
        return [self.saved(stage * self.tp_degree + tp) for tp in range(self.tp_degree)]

    def _open_plain(self, mp_rank):
        """Files of stage 0 do not name the optimizer's parameters. Ours say them beside the model file; else they are
        the module's, in order and in one group, if that fits."""
        module = open_saved(self.folder, mp_rank, with_optimizer=False).model
        shapes, seen = {}, set()
        for name, value in (module.get("module") or {}).items():
            memory = _memory_of(value)
            if name not in (module.get(keys.BUFFER_NAMES) or ()) and (memory is None or memory not in seen):
                shapes[name] = torch.Size(value.shape)
                seen.add(memory)
        try:
            return open_saved(self.folder, mp_rank, group_names=[list(shapes)], shapes=shapes)
        except ValueError as error:
            raise ValueError(
                f"{self.folder} was saved without ZeRO. Such files do not name the parameters of the optimizer, and "
                "they are not simply all of the module's in one group here, so there is nothing to convert them by. "
                "load_checkpoint reads them into any other stage without a conversion; save again from there. "
                f"({error})"
            ) from error

    def _find_info(self):
        files = get_zero_files(self.folder)
        models = (self.saved(mp_rank).model for mp_rank in self.mp_ranks())
        inner = (storage.read(path, lazy=True).get(keys.OPTIMIZER_STATE_DICT) or {} for path in files[:1])
        said = (values.get(keys.UNIVERSAL_CHECKPOINT_INFO) for values in itertools.chain(models, inner))
        return next((info for info in said if info is not None), None)

    def _refuse_experts(self):
        for mp_rank in self.mp_ranks():
            layers = layers_of(metadata_of(self.saved(mp_rank).model))
            if layers:
                raise ValueError(
                    f"{self.folder} has layers whose experts lie on different ranks ("
                    f"{', '.join(str(layer.get('module_path')) for layer in layers)}): their files do not become whole "
                    "parameters here. Its other parameters could, but the result would not be the model"
                )

    def frozen(self):
        """Names of parameters that are not trained and that some rank that saved has a part of."""
        first = self.saved(0)
        if not self.cuts_frozen:
            return [name for name in first.frozen_shapes if first.frozen_pieces(name)]
        others = {*first.shapes, *first.aliases, *(first.model.get(keys.BUFFER_NAMES) or ())}
        return [name for name in {**first.frozen_shapes, **first.module()} if name not in others]

    def mp_ranks(self):
        return list(range(self.pp_degree * self.tp_degree))

    def parameters(self):
        """dict: name of a trained parameter -> pipeline stage that it is taken from.

        Raises ValueError for one that is in several stages without a pattern that says it is the same in all.
        """
        found = {}
        for pp in range(self.pp_degree):
            for name in self.saved(pp * self.tp_degree).shapes:
                if name in found and not (self._is_pipeline or self.rules.lists(_IN_EVERY_STAGE, name)):
                    raise ValueError(
                        f"parameter '{name}' is in the pipeline stages {found[name]} and {pp}, and no entry of "
                        f"{_IN_EVERY_STAGE} in {keys.UNIVERSAL_CHECKPOINT_INFO} matches it"
                    )
                found.setdefault(name, pp)
        return found


def _memory_of(value):
    """A value that tied tensors have in common and equal ones have not; None for an empty one."""
    if torch.is_tensor(value):
        return (value.data_ptr(), tuple(value.shape)) if value.numel() else None
    return (id(value.memory), value.offset, tuple(value.shape)) if value.numel() else None


# ---- universal convert ---------------------------------------------------------------------------------------------
# The steps of a conversion to a universal checkpoint. Each handles one parameter and holds nothing of the others.


class Conversion:
    """One conversion. ``source``: a ``Source``; ``output_folder``: where the files are written.

    The methods for tasks return names of files below that folder with their records, as manifests have them."""

    def __init__(self, source, output_folder):
        self.source, self.output_folder = source, output_folder
        self.temp_dir = os.path.join(output_folder, TEMP_FOLDER)
        self.zero_dir = os.path.join(output_folder, ZERO_FOLDER)

    def extract(self, task):
        """Writes the shards of all states of a parameter, those of every rank that saved, below ``tmp/``."""
        name, stage = task
        for tp, saved in enumerate(self.source.of_stage(stage)):
            for state in [keys.FP32_WEIGHT_KEY, *saved.state_names()]:
                for number, (_, numel, reader) in enumerate(saved.pieces(name, state)):
                    write_shard(self.temp_dir, name, tp, state, number, reader.read_range(0, numel))
            for key, value in saved.scalars(name).items():
                value = eager(value)
                if torch.is_tensor(value) or isinstance(value, (int, float)):
                    write_shard(self.temp_dir, name, tp, key, 0, value)

    def merge(self, task):
        """Joins them into the parameter's files. Returns the patterns that this parameter matches, and the records."""
        name, stage = task
        shapes = [saved.shapes[name] for saved in self.source.of_stage(stage)]
        rules = ParallelRules(self.source.info, self.source.tables)
        records = merge_parameter(rules, self.zero_dir, self.temp_dir, name, shapes)
        return rules.used, records

    def frozen(self, task):
        """Writes a parameter that is not trained and is cut among the ranks that saved, in its own dtype. Returns the
        same as ``merge``."""
        (name,) = task
        rules, hints = ParallelRules(self.source.info, self.source.tables), {}
        whole = self.source.saved(0).whole(name, "weight")
        if self.source.tables:
            slices = [whole, *(saved.whole(name, "weight") for saved in self.source.of_stage(0)[1:])]
            whole, hints = merge_slices(name, slices, rules)
        record = save_state(self.zero_dir, name, keys.FP32_WEIGHT_KEY, {keys.PARAM: whole, **hints})
        return rules.used, {f"{ZERO_FOLDER}/{name}/{keys.FP32_WEIGHT_KEY}.pt": record}

    def common(self):
        """Writes what belongs to the optimizer as a whole."""
        saved = self.source.saved(0)
        groups = [
            {**{key: value for key, value in group.items() if key != "names"}, "params": [index]}
            for index, group in enumerate(saved.param_groups)
        ]
        state = plain({**saved.extra, keys.ZERO_STAGE: saved.zero_stage, keys.PARAM_GROUPS: groups})
        os.makedirs(self.zero_dir, exist_ok=True)
        path = os.path.join(self.zero_dir, OPTIMIZER_STATE)
        return {f"{ZERO_FOLDER}/{OPTIMIZER_STATE}": file_writer.PreparedTorch(state).write(path)}


def merge_parameter(rules, zero_dir, temp_dir, name, slice_shapes):
    """Joins the shards of a parameter below ``temp_dir``: of its ranks, then of its tensor-parallel slices.

    Returns the records of the files by their names. Raises ValueError when it has none of the fp32 values, or when the
    name of the parameter or of a state cannot be that of a folder or file.
    """
    records = {}
    base = os.path.dirname(os.path.dirname(shard_path(temp_dir, name, 0, STEP, 0)))
    count = len(slice_shapes)
    if not merge_zero_shards(base, keys.FP32_WEIGHT_KEY, count, slice_shapes):
        raise ValueError(f"there are no shards of parameter '{name}' below {temp_dir}")
    folders = (os.path.join(base, tp) for tp in os.listdir(base))
    for state in states_below(*filter(os.path.isdir, folders)):
        slices = merge_zero_shards(base, state, count, slice_shapes)
        if state == STEP:
            value = slices[0]
        elif not torch.is_tensor(slices[0]) or not slices[0].dim():
            value = {keys.PARAM: torch.as_tensor(slices[0])}
        else:
            whole, hints = merge_slices(name, slices, rules)
            value = {keys.PARAM: whole, **hints}
        records[f"{ZERO_FOLDER}/{name}/{state}.pt"] = save_state(zero_dir, name, state, value)
    file_writer.sync_directory(os.path.dirname(state_path(zero_dir, name, STEP)))
    return records


# ---- universal workers ---------------------------------------------------------------------------------------------


def run_tasks(conversion, step, tasks, workers):
    """Results of ``conversion.<step>(task)`` of all tasks, in order. ``workers``: threads at most; reading and writing
    do not hold Python's lock. The error of a task is raised when those that have begun are done; no other begins."""
    with concurrent.futures.ThreadPoolExecutor(max(1, workers), "deepspeed-universal") as pool:
        running = [pool.submit(getattr(conversion, step), task) for task in tasks]
        try:
            return [task.result() for task in running]
        finally:
            pool.shutdown(cancel_futures=True)
