"""A failed step on disk: the files of all ranks, read without trusting them."""

import os
import pickle
import re
import zipfile

from deepspeed.engine.parts.postmortem import VERSION
from deepspeed.formats import torch_archive

_FILE = re.compile(r"rank(\d{5})\.pt")
_NEEDED = {
    "kind",
    "error",
    "world_size",
    "axes",
    "dp_ranks",
    "micro_batches",
    "before",
    "weights",
    "states",
    "gradients",
    "groups",
    "passes",
}


class BundleError(RuntimeError):
    """A folder is no bundle, one that cannot be replayed, or one that this model did not make."""


class Bundle:
    """``ranks``: rank -> the dict that ``engine/parts/postmortem.py`` has saved, in the order of the ranks.
    ``current``: they are of this version. ``cut``: ranks have different parts of the model or of a sequence, or the
    model is a ``PipelineModule``, so all of them run it together.
    ``refusal``: the reason why the step cannot be run again; None if it can."""

    def __init__(self, folder):
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else ()
        found = {int(match[1]): match[0] for match in map(_FILE.fullmatch, names) if match}
        if not found:
            raise BundleError(f"{folder} has no file rankNNNNN.pt: name a folder ...-stepNNNNNNNN of postmortem.dir")
        self.folder = folder
        self.ranks = {rank: _read(os.path.join(folder, name)) for rank, name in found.items()}
        self.first = next(iter(self.ranks.values()))
        self.current = {content["version"] for content in self.ranks.values()} == {VERSION}
        self.cut = self.current and (self.first["pipeline"] or any(one > 1 for one in self.first["axes"].values()))
        self.refusal = next(self._refusals(), None)

    def _refusals(self):
        if not self.current:
            yield f"it has version {self.first['version']}, and this program reads version {VERSION}"
            return
        missing = sorted({*range(self.first["world_size"])} - self.ranks.keys())
        if missing:
            yield f"the files of ranks {missing} of {self.first['world_size']} are not there"
        if self.first["axes"]["pp"] > 1 and not self.first["pipeline"]:
            yield "the script ran the stages of its pipeline itself; only those of a PipelineModule can be run again"
        if self.first["changed_by"]:
            yield f"{self.first['changed_by'][0]} was on, which changes what a step computes"
        yield from (f"rank {r} has no weights: {c['left_out']}" for r, c in self.ranks.items() if not c["weights"])

    def lines(self):
        """The lines of ``show``: the content of each file."""
        for rank, content in self.ranks.items():
            yield f"rank {rank}:"
            for key, value in content.items():
                lines = str(value).splitlines() if key in ("traceback", "stacks") else [described(value)]
                yield "\n    ".join([f"  {key}:", *lines] if len(lines) > 1 else [f"  {key}: {''.join(lines)}"])
        yield f"replay: {self.refusal or 'possible'}"


def _read(path):
    try:
        content = torch_archive.load(path, trust=False)
    except (OSError, pickle.UnpicklingError, zipfile.BadZipFile, RuntimeError, ValueError) as error:
        raise BundleError(f"{path} cannot be read: {error}") from None
    version = content.get("version") if isinstance(content, dict) else None
    if not isinstance(version, int) or (version == VERSION and _NEEDED - content.keys()):
        raise BundleError(f"{path} is not a file of a post-mortem, or damaged")
    return content


def described(value):
    """Texts with dtypes and shapes in place of tensors of more than one element."""
    if hasattr(value, "shape") and value.numel() != 1:
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {described(item)}" for key, item in value.items()) + "}"
    return "(" + ", ".join(map(described, value)) + ")" if isinstance(value, (list, tuple)) else str(value)
