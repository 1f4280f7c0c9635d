"""Weights of a checkpoint for others to read, what differs between two, and the script that needs no package."""

import ast
import functools
import os
import stat

import torch

from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.layouts.names import SCRIPT
from deepspeed.checkpoint.layouts.open_saved import open_run
from deepspeed.checkpoint.layouts.saved_state import Range, eager, plain
from deepspeed.checkpoint.read import cli
from deepspeed.formats.coded_weight import decoded_weights
from deepspeed.formats.weight_files import StoredWeight, write_text, write_weight_files, write_whole
from deepspeed.log import logger

# ---- difference ----------------------------------------------------------------------------------------------------
# What differs between two checkpoints, parameter by parameter, whatever stage and number of ranks wrote each.

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def open_any(path, tag=None):
    """The checkpoint in ``path``: the folder of a tag, or a directory of which ``tag`` or the latest one is meant."""
    if not os.path.isdir(path):
        raise FileNotFoundError(f"there is no directory {path}")
    if tag is None and cli.is_checkpoint(path):
        return open_run(path)
    tag = names.latest_tag(path) if tag is None else str(tag)
    if tag is None:
        raise FileNotFoundError(f"{path} is not a checkpoint and has no file 'latest' that names one")
    return open_run(os.path.join(path, tag))


def _whole(saved, name, kind):
    return saved.whole(name, kind).view(-1) if saved.pieces(name, kind) else None


def _differ(what, a, b):
    return [f"{what}: {a} in A, {b} in B"] if a != b else []


def _compare(what, a, b):
    if (a is None) != (b is None):
        return [f"{what}: only in {'B' if a is None else 'A'}"]
    if a is None or (a.shape == b.shape and torch.equal(a.double(), b.double())):
        return []
    if a.shape != b.shape:
        return [f"{what}: {a.numel()} elements in A, {b.numel()} in B"]
    gap = (a.double() - b.double()).abs()
    count = int(((gap > 0) | gap.isnan()).sum() if a.is_floating_point() else (a != b).sum())
    by = f", by at most {gap.nan_to_num(float('inf')).max():.3g}" if a.is_floating_point() else ""
    return [f"{what}: {count} of {a.numel()} elements differ{by}"] if count else []


def difference(first, second, limit=50):
    """Lines that say what differs: weights, fp32 masters, optimizer states, steps, counters. One tensor at a time is in
    memory. At most ``limit`` lines and one that says how many more; [] when all is equal."""
    a, b = open_any(first), open_any(second)
    lines = [line for key in _COUNTERS for line in _differ(key, a.model.get(key), b.model.get(key))]
    weights = dict.fromkeys([*a.module(), *a.shapes, *b.module(), *b.shapes])
    aliases = {**a.aliases, **b.aliases}  # the same tensor under another name
    for name in (name for name in weights if name not in aliases):
        shapes = [saved.weight_shape(name) for saved in (a, b)]
        other = _differ(name, *map(tuple, shapes)) if None not in shapes else []
        lines += other or _compare(name, _whole(a, name, "weight"), _whole(b, name, "weight"))
    kinds = dict.fromkeys(["fp32", *a.state_names(), *b.state_names()])
    for name in a.shapes.keys() & b.shapes.keys():
        for kind in kinds:
            lines += _compare(f"{kind} of {name}", _whole(a, name, kind), _whole(b, name, kind))
        lines += _differ(f"step of {name}", a.step(name), b.step(name))
    if bool(a.shapes) != bool(b.shapes):
        lines.append("optimizer states are not compared: only one of the two says whose they are (stage 0 does not)")
    if len(lines) > limit:
        lines[limit:] = [f"... and {len(lines) - limit} more"]
    return lines


# ---- native export -------------------------------------------------------------------------------------------------
# Weights of a checkpoint as files that every library reads: model.safetensors or pytorch_model.bin, in shards. No
# engine, and no more memory than one chunk: elements go from the checkpoint's files to the new ones. Works for the
# native format and for every other one that says the names of its parameters.

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class SavedWeight(StoredWeight):
    """``pieces``: (reader, first element, numel) with readers of a ``SavedState``."""

    def _opened(self, reader):
        return Range(reader.source(), reader.base) if callable(getattr(reader, "source", None)) else reader


def weights_of(saved, dtype=torch.float32, exclude_frozen_parameters=False):
    """``{name: SavedWeight}`` of a ``SavedState``, in the order of the module's state; tied names with the same object.

    Trained parameters come from the fp32 masters where there are some, small floats are decoded; parameters become
    ``dtype``. Buffers stay what they are; those of fewer bits become fp32 if ``dtype`` is that. ValueError for a
    parameter that is not there whole.
    """
    trained, aliases, module = saved.shapes, saved.aliases, saved.module()
    buffers = set(saved.model.get("buffer_names") or ())
    made, found = {}, {}
    for name in dict.fromkeys([*(saved.model.get("module") or ()), *trained, *module]):
        known = aliases.get(name, name)
        if exclude_frozen_parameters and known not in trained and known not in buffers:
            continue
        shape = saved.weight_shape(known)
        if known not in made and shape is not None:
            pieces = (saved.pieces(known, "fp32") if known in trained else ()) or saved.pieces(known, "weight")
            made[known] = _weight(saved, known, shape, pieces, dtype, known in buffers, module)
        if known in made:
            found[name] = made[known]
    return decoded_weights(found, saved.model.get(names.QUANTIZED_PARAMS), dtype)


def _weight(saved, name, shape, pieces, dtype, is_buffer, module):
    stored = pieces[0][2].read_range(0, 0) if pieces and name not in module else module.get(name)
    own = stored.dtype if stored is not None else torch.float32
    if not own.is_floating_point or (is_buffer and (dtype != torch.float32 or own == torch.float64)):
        dtype = own
    saved.read_into(torch.Size(shape).numel(), pieces, 0, f"'{name}'")
    return SavedWeight([(reader, 0, numel) for _, numel, reader in pieces], shape, dtype)


def export(
    checkpoint_dir,
    output_dir,
    tag=None,
    dtype="fp32",
    max_shard_size="5GB",
    safe_serialization=True,
    exclude_frozen_parameters=False,
):
    """Writes the weights of a checkpoint to ``output_dir`` and returns the files: model.safetensors, or numbered ones
    and an index when that is larger than ``max_shard_size``; pytorch_model.bin without ``safe_serialization``.

    checkpoint_dir: what save_checkpoint was given, or the folder of a tag. tag: by default what ``latest`` says.
    dtype: "fp32", "bf16" or "fp16", of the parameters.
    Raises FileNotFoundError without a checkpoint, ValueError for one whose weights are slices of model-parallel ranks.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r} is none of {', '.join(DTYPES)}")
    saved = open_any(checkpoint_dir, tag)
    ranks = saved.model.get("mp_world_size", 1)
    if ranks > 1 and not saved.is_whole:
        raise ValueError(
            f"{saved.origin()} holds slices of {ranks} model-parallel ranks: join them with ds_to_universal first, "
            "which knows the rules, and export its result"
        )
    weights = weights_of(saved, DTYPES[dtype], exclude_frozen_parameters)
    if not weights:
        raise ValueError(f"{saved.origin()} has no weights to export")
    return write_weight_files(weights, output_dir, max_shard_size, safe_serialization)


# ---- native universal ----------------------------------------------------------------------------------------------
# The files beside the parameters of a universal checkpoint, made of one in the native format.


def torch_files(saved, mp_rank):
    """``(name, value)`` of the model file of a model-parallel rank and of what its runs need to go on; ``saved`` is its
    ``NativeState``. Trained weights are placeholders in the model file, as at ZeRO stage 3."""
    whole = saved.module()
    module = {key: eager(whole[key]) if key in whole else torch.empty(0) for key in saved.model["module"]}
    state = {key: value for key, value in saved.model.items() if key != "module"}
    yield names.MODEL_STATES(mp_rank=mp_rank), {"module": module, **plain(state)}
    groups = [group["names"] for group in saved.param_groups]
    for rank in saved.ranks:
        yield names.RUN_STATES(rank=rank), {**saved.run_states(rank)[0], "group_names": groups}


# ---- standalone ----------------------------------------------------------------------------------------------------
# The script zero_to_fp32.py that a checkpoint folder gets: one file, made of the modules that it needs. It must run
# where DeepSpeed is not installed, so it cannot import them; and it must do what they do, so they are joined.

# Each uses the ones before it.
MODULES = (
    "host/recorded_names",
    "formats/byte_ranges",
    "formats/lazy_tensor",
    "formats/swapped_tensors",
    "formats/standalone_reader",
    "formats/torch_archive_writer",
    "formats/weight_files",
    "formats/joined_weight",
    "formats/coded_weight",
    "utils/zero_files",
    "utils/zero_to_fp32",
)


def _names(tree):
    """The names that a module binds at its top level, without those of imports."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        for target in node.targets if isinstance(node, ast.Assign) else ():
            yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def bundle(sources):
    """One module out of ``{name: source}``, in their order: imports first, each once; those of each other fall away.

    ValueError when two of them bind the same name at the top level.
    """
    imports, bodies, owner, docstring = set(), [], {}, None
    for name, source in sources.items():
        tree, lines = ast.parse(source), source.splitlines()
        docstring = ast.get_docstring(tree, clean=False)
        for bound in _names(tree):
            if owner.setdefault(bound, name) != name:
                raise ValueError(f"{owner[bound]} and {name} both have a {bound} at the top level")
        statements = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        imports.update(map(ast.unparse, statements))
        for node in (*statements, tree.body[0]):
            lines[node.lineno - 1 : node.end_lineno] = [None] * (node.end_lineno - node.lineno + 1)
        body = "\n".join(line for line in lines if line is not None).strip("\n")
        bodies.append(f"# ==== {name} ====\n{body.removeprefix('#!/usr/bin/env python').lstrip()}")
    others = (text for text in imports if not text.startswith("from deepspeed"))
    head = f'#!/usr/bin/env python\n"""{docstring}"""\n\n' + "\n".join(sorted(others, key=lambda i: ("torch" in i, i)))
    return "\n\n\n".join([head, *bodies]) + "\n"


@functools.lru_cache(maxsize=1)
def script():
    """The text of the script."""
    sources = {}
    for name in MODULES:
        path = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(names.__file__))), *name.split("/"))
        with open(f"{path}.py", encoding="utf-8") as file:
            sources[os.path.basename(name)] = file.read()
    return bundle(sources)


def write_script(folder):
    """Puts the script into ``folder``, executable, and returns its path. That it cannot be made executable is only
    logged: not every file system knows the bit."""
    path = os.path.join(folder, SCRIPT)
    write_whole(path, write_text, script())
    try:
        os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    except OSError as error:
        logger.warning(f"{path} cannot be made executable ({error.strerror}); run it as: python {path}")
    return path
