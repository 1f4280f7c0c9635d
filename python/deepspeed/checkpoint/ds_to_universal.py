"""Turns a checkpoint into a universal one, which any number of ranks, ZeRO stage and parallel layout can load.

    python -m deepspeed.checkpoint.ds_to_universal --input_folder ckpt/global_step10 --output_folder ckpt/universal

Memory stays at about one parameter for each worker, and disk at twice the states while the shards are there. The result
is written beside the output folder, in a hidden one, and takes its name when it is whole: an earlier result stays until
then. A manifest in it lists its files; whatever else is in the output folder stays there.
"""

import argparse
import os
import shutil
import time

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.autoep_universal import (  # noqa: F401 (published here)
    _aggregate_autoep_zero12_metadata,
    _autoep_expert_param_names_by_rank,
    _uses_zero3_partitioned_autoep_metadata,
    merge_zero_shards,
    write_shard,
)
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT
from deepspeed.checkpoint.convert.export import torch_files
from deepspeed.checkpoint.convert.universal import Conversion, Source, merge_parameter, run_tasks
from deepspeed.checkpoint.layouts import names, storage
from deepspeed.checkpoint.layouts.saved_shards import SlicedState
from deepspeed.checkpoint.layouts.saved_state import plain
from deepspeed.checkpoint.layouts.saved_universal import ParallelRules
from deepspeed.checkpoint.write import commit
from deepspeed.checkpoint.write.file_writer import PreparedTorch, file_crc32, file_record, replace_file
from deepspeed.checkpoint.write.pointer import replace_text
from deepspeed.formats.recorded_paths import path_below
from deepspeed.log import logger
from deepspeed.version import __version__

# Flags -> how argparse is to treat them.
OPTIONS = {
    "--input_folder": dict(required=True, help="folder of one tag of a checkpoint"),
    "--output_folder": dict(required=True, help="folder of the universal checkpoint, made if need be"),
    "--num_extract_workers": dict(type=int, default=4, help="threads that cut shards out of the files"),
    "--num_merge_workers": dict(type=int, default=2, help="threads that join them to parameters"),
    "--keep_temp_folder": dict(action="store_true", help="leave the shards below tmp/"),
    "--no_strict": dict(
        dest="strict",
        action="store_false",
        help="patterns of universal_checkpoint_info that match no parameter are warned about, not refused",
    ),
    "--inject_missing_state": dict(
        action="store_true",
        help="take an empty universal_checkpoint_info where a checkpoint of several model-parallel ranks has none",
    ),
}


def parse_arguments(args=None):
    """The command line as a namespace for ``main``."""
    parser = argparse.ArgumentParser(prog="ds_to_universal", description=__doc__.splitlines()[0])
    for flag, settings in OPTIONS.items():
        parser.add_argument(flag, **settings)
    return parser.parse_args(args)


def main(args):
    """``args``: a namespace with the options of the command line; those that it lacks have their defaults.

    Raises FileNotFoundError without a checkpoint, ValueError where files or patterns do not fit, for an output folder
    that is, holds or lies in the input folder, and for names in the checkpoint that lead out of the output folder.
    Whatever is raised, the output folder is as it was. ``latest_universal`` beside it moves when everything else is
    done.
    """
    source, target = os.path.realpath(args.input_folder), os.path.realpath(args.output_folder)
    _refuse_overlap(source, target)
    if names.is_universal(source):
        raise ValueError(f"{source} is a universal checkpoint already")
    opened = Source(source, getattr(args, "inject_missing_state", False))
    if not opened.tables:  # they say how slices are put together that patterns cannot describe
        _validate_autotp_conversion_support(opened.info)
    if os.path.lexists(target) and not os.path.isdir(target):
        raise NotADirectoryError(f"--output_folder {target} is a file: name a folder, which is made if need be")
    staging = commit.begin(target)
    try:
        facts, records = _convert(Conversion(opened, staging), target, args)
        commit.finish(target, staging, facts, records)
    except BaseException as error:
        commit.abandon(target, staging)
        if isinstance(error, (KeyError, TypeError, AttributeError, IndexError)):
            raise RuntimeError(
                f"{source} cannot be converted: what its files hold does not fit ({type(error).__name__}: {error}); "
                "convert another tag"
            ) from error
        raise
    pointer = os.path.join(os.path.dirname(os.path.abspath(args.output_folder)), names.LATEST_UNIVERSAL)
    replace_text(pointer, os.path.basename(os.path.abspath(args.output_folder)))
    logger.info(f"{target} is the universal checkpoint of {source}")


def _refuse_overlap(source, target):
    if source == target:
        raise ValueError(f"--input_folder and --output_folder are both {source}: give the result a folder of its own")
    if os.path.commonpath([source, target]) in (source, target):
        inside = "lies in" if os.path.commonpath([source, target]) == source else "holds"
        raise ValueError(
            f"--output_folder {target} {inside} --input_folder {source}: the conversion would write where it reads. "
            "Give the result a folder beside that of the tag"
        )


def _convert(conversion, target, args):
    """Writes all files. Returns what the manifest says: facts, and name -> record of every file."""
    source, folder, keeps = conversion.source, conversion.output_folder, getattr(args, "keep_temp_folder", False)
    tasks, mp_ranks = [*map(list, source.parameters().items())], source.mp_ranks()  # names, pipeline stages
    logger.info(f"{source.folder}: {len(tasks)} parameters of ZeRO stage {source.zero_stage}, "
                f"{source.pp_degree} x {source.tp_degree} model-parallel ranks")  # fmt: skip
    if os.path.lexists(conversion.temp_dir):  # only where folders cannot be renamed: this is the output folder itself
        raise ValueError(
            f"{conversion.temp_dir} is not of this conversion, which needs the name for its shards: move it away"
        )
    os.mkdir(conversion.temp_dir)
    try:
        run_tasks(conversion, "extract", tasks, getattr(args, "num_extract_workers", 4))
        workers = getattr(args, "num_merge_workers", 2)
        merged = run_tasks(conversion, "merge", tasks, workers)
        merged += run_tasks(conversion, "frozen", [[name] for name in source.frozen()], workers)
        if not source.tables:  # the engine itself wrote patterns of all parameters, also of those that were not saved
            _check_patterns(source.rules, [used for used, _ in merged], args)
        written = [*(files for _, files in merged), conversion.common()]
        records = {name: record for files in written for name, record in files.items()}
        copied = _copy_other_files(source.folder, folder)
        for mp_rank in mp_ranks:
            _add_to_model_files(source.saved(mp_rank), mp_rank, source.folder, folder)
        for mp_rank in mp_ranks if names.is_native(source.folder) else ():
            for name, value in torch_files(source.saved(mp_rank), mp_rank):
                records[name] = replace_file(PreparedTorch(value), path_below(folder, name, source.folder, "entry"))
        for root, _, files in os.walk(conversion.temp_dir) if keeps else ():
            copied += [os.path.relpath(os.path.join(root, name), folder) for name in files]
        records.update({name: _record_of(folder, name) for name in copied})
    finally:
        if not keeps:
            shutil.rmtree(conversion.temp_dir, ignore_errors=True)
    facts = {
        "tag": os.path.basename(target),
        "saved_at": time.time(),
        "ds_version": __version__,
        "universal": True,
        "zero_stage": source.zero_stage,
        "global_steps": int(source.saved(0).model.get("global_steps") or 0),
    }
    return facts, records


def _record_of(folder, name):
    """Returns the record of a file that was copied or written in one piece, once it is on the disk."""
    path = os.path.join(folder, name)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return file_record(name, os.path.getsize(path), file_crc32(path))


def _check_patterns(rules, used, args):
    unused = ", ".join(sorted(rules.patterns() - {pattern for found in used for pattern in found}))
    text = f"these patterns of {keys.UNIVERSAL_CHECKPOINT_INFO} match no parameter: {unused}. Correct them"
    if unused and getattr(args, "strict", not getattr(args, "no_strict", False)):
        raise ValueError(f"{text}, or pass --no_strict if this model has no such parameters")
    if unused:
        logger.warning(text)


def _copy_other_files(source, target):
    """Model files, which have buffers, counters and client state, and what a run needs to go on; experts are whole
    parameters of the result. Returns their names."""
    kinds = names.MODEL_STATES, names.SHARDED_MODEL_STATES, names.LAYER_STATES, names.RUN_STATES
    copied = [name for kind in kinds for name in kind.found_in(source)]
    for name in copied:
        shutil.copy2(os.path.join(source, name), os.path.join(target, name))
    return copied


def _add_to_model_files(saved, mp_rank, source, target):
    """Adds to the model files what files of experts have besides trained weights: their buffers."""
    module, trained = saved.model.get("module") or {}, saved.shapes
    more = {name: value for name, value in saved.module().items() if name not in module and name not in trained}
    kinds = (names.MODEL_STATES, names.SHARDED_MODEL_STATES) if more and not names.is_native(source) else ()
    files = {name: known for kind in kinds for name, known in kind.found_in(target).items()}
    for path in [os.path.join(target, name) for name, known in files.items() if known["mp_rank"] == mp_rank]:
        state = plain(storage.read(path, lazy=True))
        state["module"] = {**(state["module"] or {}), **plain(more)}
        replace_file(PreparedTorch(state), path)


# ---- the single steps, under the names that scripts import -----------------------------------------------------------
def _get_zero3_model_state_files(checkpoint_dir):
    """Model files of all ranks of a checkpoint of ZeRO stage 3, in rank order."""
    found = names.SHARDED_MODEL_STATES.found_in(checkpoint_dir)
    if not found:
        raise FileNotFoundError(f"{checkpoint_dir} has no model files of ZeRO stage 3")
    return [os.path.join(checkpoint_dir, name) for name in found]


def _validate_autotp_conversion_support(universal_checkpoint_info):
    """Raises ValueError for a model with parameters that automatic tensor parallelism has cut in a way that cannot be
    put together again."""
    found = (universal_checkpoint_info or {}).get(keys.AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS)
    if found:
        raise ValueError(
            f"{keys.UNIVERSAL_CHECKPOINT_INFO} lists parameters whose tensor-parallel slices cannot be put together: "
            f"{', '.join(map(str, found))}. Save this model without automatic tensor parallelism to convert it"
        )


def _group_per_tp_shapes(slice_shapes_by_tp, pp_degree, tp_degree):
    """dict: name -> shapes of its slices, one for each tensor-parallel rank.

    ``slice_shapes_by_tp``: what each model-parallel rank says, in rank order (stage by stage): a dict name -> shape, or
    a list of such dicts. Raises ValueError for a parameter that some tensor-parallel ranks of its stage lack.
    """
    if len(slice_shapes_by_tp) != pp_degree * tp_degree:
        raise ValueError(f"{len(slice_shapes_by_tp)} ranks for {pp_degree} stages of {tp_degree} tensor-parallel ones")
    found = {}
    for pp in range(pp_degree):
        ranks = [
            said if isinstance(said, dict) else {name: shape for group in said for name, shape in group.items()}
            for said in slice_shapes_by_tp[pp * tp_degree : (pp + 1) * tp_degree]
        ]
        for name in ranks[0]:
            lacking = [rank for rank, shapes in enumerate(ranks) if name not in shapes]
            if lacking:
                raise ValueError(f"parameter '{name}' is missing on the tensor-parallel ranks {lacking} of stage {pp}")
            found.setdefault(name, [shapes[name] for shapes in ranks])
    return found


_merge_zero_shards = merge_zero_shards


def merge_tp_slices(uc_info, dir, slice_dir, tp_degree, name_and_shapes):
    """Joins the shards of one parameter below ``slice_dir`` into its folder below ``dir``.

    ``name_and_shapes``: its name, and the shape of its slice or a list with one for each of the ``tp_degree`` ranks.
    Returns the patterns of ``uc_info`` that do not match the name.
    """
    name, shapes = name_and_shapes
    if not shapes or isinstance(shapes[0], int):
        shapes = [shapes] * tp_degree
    rules = ParallelRules(uc_info)
    merge_parameter(rules, dir, slice_dir, name, list(shapes))
    return rules.patterns() - rules.used


def extract_zero_shards_stage3(
    optim_files_grid, param_shapes_grid, dp_degree, temp_dir, indices, exclude_param_names=None
):
    """Writes the shards that one rank of ZeRO stage 3 has below ``temp_dir``.

    ``optim_files_grid``: for each tensor-parallel rank the optimizer files of its ``dp_degree`` data-parallel ranks;
    ``param_shapes_grid``: for each one its ``param_shapes``. ``indices``: (tensor-parallel rank, data-parallel rank).
    """
    tp_index, dp_index = indices
    files = (storage.read(path, lazy=True) for path in optim_files_grid[tp_index][:dp_degree])
    saved = SlicedState([state[OPTIMIZER_STATE_DICT] for state in files], param_shapes_grid[tp_index])
    for name, shape in saved.shapes.items():
        if name in (exclude_param_names or ()):
            continue
        begin = dp_index * -(-shape.numel() // dp_degree)
        for state in [keys.FP32_WEIGHT_KEY, *saved.state_names()]:
            for offset, numel, reader in saved.pieces(name, state):
                if offset == begin and numel:
                    write_shard(temp_dir, name, tp_index, state, dp_index, reader.read_range(0, numel))
        step = saved.scalars(name).get("step")
        if step is not None:
            write_shard(temp_dir, name, tp_index, "step", dp_index, step)


if __name__ == "__main__":
    main(parse_arguments())
