"""Names of the files in a checkpoint folder, and which keys of the model file are whose."""

import dataclasses
import errno
import functools
import itertools
import os
import re

from deepspeed.checkpoint.constants import (
    BUFFER_NAMES,
    CHECKPOINT_PARALLEL_DIMS,
    DS_VERSION,
    FROZEN_PARAM_FRAGMENTS,
    FROZEN_PARAM_SHAPES,
    LAYER_FILE_PREFIX,
    MODEL_FILE_PREFIX,
    MODEL_FILE_SUFFIX,
    OPTIM_FILE_SUFFIX,
    PARAM_SHAPES,
    TENSOR_CUTS,
    ZERO_FILE_PREFIX,
)
from deepspeed.host.recorded_names import path_below, read_tag

# ---- names ---------------------------------------------------------------------------------------------------------

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
SCRIPT = "zero_to_fp32.py"  # beside the tags; convert/export.py makes its text


@dataclasses.dataclass(frozen=True)
class FileName:
    """The names of one kind of file at the top of a tag's folder. ``template`` makes a name of its numbers. ``form``, a
    regular expression with the same names of numbers, recognizes such names where other implementations write more
    forms than we do."""

    template: str
    form: str = ""

    def __call__(self, **numbers):
        """The name. ``mp_rank`` is 0 and texts are empty where they are not given."""
        return self.template.format(**{"mp_rank": 0, "prefix": "", "slices": "", **numbers})

    def path(self, folder, **numbers):
        return os.path.join(folder, self(**numbers))

    @functools.cached_property
    def _pattern(self):
        return re.compile(self.form or re.sub(r"{(\w+)(:\w+)?}", r"(?P<\1>\\d+)", self.template.replace(".", r"\.")))

    def find(self, name):
        """dict of the numbers and texts in ``name`` (None for one that it leaves out), or None for another kind."""
        match = self._pattern.fullmatch(name)
        found = match.groupdict() if match else {}
        return match and {key: int(value) if (value or "").isdecimal() else value for key, value in found.items()}

    def found_in(self, folder):
        """``{name: numbers}`` of these files in ``folder``, in the order of the numbers in their names."""
        found = {name: self.find(name) for name in sorted(os.listdir(folder), key=natural_key)}
        return {name: numbers for name, numbers in found.items() if numbers is not None}


def natural_key(text):
    """Sorts ``rank_10`` after ``rank_9``."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text)]


_MP_RANK = MODEL_FILE_PREFIX + "{mp_rank:02d}"
MODEL_STATES = FileName(_MP_RANK + MODEL_FILE_SUFFIX)
# At ZeRO stage 3 every data-parallel rank writes one.
SHARDED_MODEL_STATES = FileName(ZERO_FILE_PREFIX + "{dp_rank}_" + MODEL_STATES.template)
# At ZeRO stages 1 to 3 every data-parallel rank writes one. The prefix says the precision.
OPTIM_STATES = FileName(
    "{prefix}" + ZERO_FILE_PREFIX + "{dp_rank}_" + _MP_RANK + OPTIM_FILE_SUFFIX,
    r"(?P<prefix>(?:bf16_|fp16_)?)zero_pp_rank_(?P<dp_rank>\d+)_mp_rank_(?P<mp_rank>\d+)_optim_states\.pt",
)
PREFIXES = ("bf16_", "", "fp16_")
# Experts' optimizer states without ZeRO: every expert-parallel rank writes one.
EXPERT_OPTIM_STATES = FileName("expp_rank_{expp_rank}_" + _MP_RANK + OPTIM_FILE_SUFFIX)
# Weights of a layer of a pipeline. The slices say which of its tensor-parallel ranks: "-model_01".
LAYER_STATES = FileName(
    LAYER_FILE_PREFIX + "{layer:02d}{slices}-model_states.pt",
    r"layer_(?P<layer>\d+)(?P<slices>(?:-\w+_\d+)*)[-_]model_states\.pt",
)
# Weights of an expert, by its number among those of all ranks.
EXPERT_STATES = FileName(
    "layer_{layer}_expert_{expert}_" + MODEL_STATES.template,
    r"(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp_rank>\d+)_model_states\.pt",
)
# Ours: frozen weights that ranks share by rows, whole.
FROZEN_ROWS = FileName("frozen_rows_" + MODEL_STATES.template)
# Ours, one for each rank: what a resumed run needs to go on bit by bit and no other tool reads.
RUN_STATES = FileName("run_rank_{rank:05d}_state.pt", r"run_rank_(?P<rank>\d{5,})_state\.pt")
# Names that saves of any kind, of this or another implementation, put at the top of a tag's folder, and no others:
# files with these names may be removed when the tag is saved again.
PUBLISHED = (
    MODEL_STATES, SHARDED_MODEL_STATES, OPTIM_STATES, EXPERT_OPTIM_STATES, LAYER_STATES, EXPERT_STATES, FROZEN_ROWS,
    RUN_STATES,
)  # fmt: skip

# Ours, in the model file: which parameters, experts and layers are in files of only some ranks.
PARAMS_BY_RANK = "params_by_rank"
# Ours, in the model file: shape, dtype and codes of the frozen weights that are small floats, by name.
QUANTIZED_PARAMS = "quantized_params"
# Keys of the model file that load_checkpoint keeps for itself; every other one is handed back in client_state.
ENGINE_KEYS = (
    "module",
    "sparse_tensor_module_names",
    "skipped_steps",
    "global_steps",
    "dp_world_size",
    "mp_world_size",
    "data_sampler",
    "random_ltd",
    PARAMS_BY_RANK,
    QUANTIZED_PARAMS,
    TENSOR_CUTS,
)
RESERVED_KEY = CHECKPOINT_PARALLEL_DIMS
# Keys of the engine that load_checkpoint hands back all the same, as callers expect.
OWN_KEYS = (
    BUFFER_NAMES,
    "optimizer",
    PARAM_SHAPES,
    FROZEN_PARAM_SHAPES,
    "shared_params",
    FROZEN_PARAM_FRAGMENTS,
    "lr_scheduler",
    "global_samples",
    RESERVED_KEY,
    "ds_config",
    DS_VERSION,
    PARAMS_BY_RANK,
)


def latest_tag(save_dir, pointer=LATEST):
    """The tag that ``save_dir/latest`` names, or None. Raises as ``read_tag``."""
    try:
        return read_tag(save_dir, pointer)
    except FileNotFoundError:
        return None


def layer_states(layer, slices=""):
    """The file of a layer of a pipeline; ``slices``: "model_01", or "" for a whole layer."""
    return LAYER_STATES(layer=layer, slices=f"-{slices}" if slices else "")


# ---- universal names -----------------------------------------------------------------------------------------------
# Files that a conversion to a universal checkpoint puts below the folder's top: parameters, and shards that are kept.
# Names of parameters and states stand in the files that are converted: each becomes one folder or file, and none may
# leave the output.

ZERO_FOLDER = "zero"
TEMP_FOLDER = "tmp"
OPTIMIZER_STATE = "optimizer_state.pt"
STEP = "step"
_UNIVERSAL_FILE = re.compile(r"zero/(optimizer_state\.pt|[^/]+/[^/]+\.pt)|tmp/[^/]+/\d+/[^/]+\.\d+")


def is_universal_file(path):
    """Whether conversions to universal checkpoints make files of this path below their folder."""
    return _UNIVERSAL_FILE.fullmatch(path) is not None


def is_universal(folder):
    """Whether ``folder`` is that of a universal checkpoint."""
    return os.path.isdir(os.path.join(folder, ZERO_FOLDER))


def _below(folder, *parts):
    for part in parts:
        folder = path_below(folder, part, "the checkpoint that is converted", "entry")
    return folder


def state_path(folder, name, state):
    """The path of the whole ``state`` of the parameter ``name`` below ``folder``. ValueError for a name that cannot be
    that of a folder or a file there."""
    return _below(folder, name, f"{state}.pt")


def shard_path(temp_dir, name, tp_index, state, dp_index):
    """The path of one rank's shard of it below ``temp_dir``."""
    return _below(temp_dir, name, str(tp_index), f"{state}.{dp_index:02d}")


# ---- native names --------------------------------------------------------------------------------------------------
# Names in the native format: of its files, and of the tensors in them. docs/tutorials/native-checkpoints.md has both.
# Needs no torch.

FORMAT = "deepspeed-native"
VERSION = 1

MASTER = "fp32"  # kind of the fp32 weights that are trained
MODULE = "module"  # kind of what the module has besides: buffers, weights that are not trained
VALUES = "values"  # kind of tensors inside of values that are JSON otherwise
RESERVED = (MASTER, MODULE, VALUES)

# The facts that all ranks of a model-parallel rank have in common; the first one's file has no number.
CHECKPOINT_JSON = FileName("checkpoint_mp_rank_{mp_rank:02d}.json", r"checkpoint(_mp_rank_(?P<mp_rank>\d{2,}))?\.json")
# Every rank writes one of each: facts, and tensors.
RANK_JSON = FileName("rank_{rank:05d}.json", r"rank_(?P<rank>\d{5,})\.json")
RANK_TENSORS = FileName("rank_{rank:05d}.safetensors", r"rank_(?P<rank>\d{5,})\.safetensors")
# The digest is hexadecimal, of names and values.
FROZEN_TENSORS = FileName("frozen_{digest:.32}.safetensors", r"frozen_(?P<digest>[0-9a-f]+)\.safetensors")
NATIVE = CHECKPOINT_JSON, RANK_JSON, RANK_TENSORS, FROZEN_TENSORS


def checkpoint_json(mp_rank=0):
    return CHECKPOINT_JSON(mp_rank=mp_rank) if mp_rank else "checkpoint.json"


def _is_of(kinds, name):
    return any(kind.find(name) is not None for kind in kinds)


# Each says whether ``name`` is that of such a file at the top of a tag.
is_published_file = functools.partial(_is_of, PUBLISHED)
is_native_file = functools.partial(_is_of, NATIVE)
is_checkpoint_file = functools.partial(_is_of, (*PUBLISHED, *NATIVE))
is_model_file = functools.partial(_is_of, (MODEL_STATES, SHARDED_MODEL_STATES))


def is_native(folder):
    """Whether ``folder`` is that of a tag in the native format."""
    return os.path.exists(os.path.join(folder, checkpoint_json()))


def mp_size(folder):
    """Model-parallel ranks that have saved the tag ``folder``."""
    return next(n for n in itertools.count(1) if not os.path.exists(os.path.join(folder, checkpoint_json(n))))


def key_of(kind, name, offset=None):
    """The name of a tensor: ``kind/name`` for a whole one, ``kind/name@offset`` for a run of its elements.

    A whole one with an @ in its name gets ``@0`` as well, so that the last @ always stands before an offset.
    """
    if kind == VALUES or (offset is None and "@" not in name):
        return f"{kind}/{name}"
    return f"{kind}/{name}@{offset or 0}"


def parsed(key):
    """Inverse of ``key_of``: ``(kind, name, offset)``, offset None for a whole tensor without an @ in its name."""
    kind, _, rest = key.partition("/")
    if kind == VALUES or "@" not in rest:
        return kind, rest, None
    name, _, offset = rest.rpartition("@")
    return kind, name, int(offset)


# ---- tags ----------------------------------------------------------------------------------------------------------
# What a tag may be: the name of a folder in the save directory, or a path to one in it.

HIDDEN = ("making", "saving", "replaced", "removing", "meeting")  # what hidden folders beside a tag's end with


def check_tag(tag, save_dir):
    """Raises ValueError for a ``tag`` (a text) under which nothing can be saved in ``save_dir``, or not found again."""

    plain = "Pass the name of a folder to be made in save_dir, such as tag='step100', or None for global_step<N>"
    parts, hidden = tag.rstrip("/").split("/"), tuple(f".{what}" for what in HIDDEN)
    rules = (
        (
            not tag.strip(),
            f"is empty: the checkpoint would be {save_dir} itself and replace the other tags there",
            plain,
        ),
        (
            "\0" in tag or "\n" in tag or tag != tag.strip(),
            "begins or ends with blanks, or has a line break or zero byte in it: 'latest' could not name it",
            plain,
        ),
        (
            os.path.isabs(tag),
            f"is an absolute path: it leaves save_dir {save_dir}",
            "Pass that folder as save_dir, and a name as tag",
        ),
        (
            not {os.pardir, os.curdir, ""}.isdisjoint(parts),
            f"has a part '.', '..' or '': it may leave save_dir {save_dir}, or name a folder that has another name too",
            f"{plain}; a folder in a folder is tag='run1/step100'",
        ),
        (
            len(parts) == 1 and parts[0] in (LATEST, LATEST_UNIVERSAL, SCRIPT),
            "is the name of a file that a save writes into save_dir",
            plain,
        ),
        (
            any(part.startswith(".") and part.endswith(hidden) for part in parts),
            "is the name of a hidden folder of a save in progress",
            plain,
        ),
    )
    for applies, why, fix in rules:
        if applies:
            raise ValueError(f"the checkpoint tag {tag!r} {why}. {fix}")


def folder_of(save_dir, tag):
    """The folder that ``tag`` is, symbolic links followed: so it can be replaced, and lies where its disk is.

    Raises ValueError for a link to the save directory itself or to a folder above it, NotADirectoryError where a file
    has that name.
    """
    folder, above = os.path.realpath(os.path.join(save_dir, tag)), os.path.realpath(save_dir)
    if os.path.commonpath([folder, above]) == folder:
        raise ValueError(
            f"the checkpoint tag {tag!r} is a link to {folder}, which holds save_dir {save_dir}: the checkpoint would "
            "replace it. Remove the link, or pass another tag"
        )
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise NotADirectoryError(
            errno.ENOTDIR, f"the checkpoint tag {tag!r} is a file, {folder}: move it away, or pass another tag", folder
        )
    return folder
