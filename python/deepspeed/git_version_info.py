"""Version and origin of this build, under the names that scripts import.

An installed package says what its build wrote down; a source tree is asked now. ``installed_ops`` and
``compatible_ops`` are {name of an op: bool} of this process, found out when they are first used.
"""

import importlib
import importlib.util
import os
import runpy

from deepspeed.host.source_tree import commit
from deepspeed.host.torch_nccl import nccl_in_use
from deepspeed.registry import load_target
from deepspeed.version import __version__

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _build_info():
    # Written by the build into the installed package; a source tree that was only put on the path has none.
    return (
        importlib.import_module("deepspeed._build_info") if importlib.util.find_spec("deepspeed._build_info") else None
    )


def _torch_here():
    # As text, without importing torch: {"version": "2.11", "cuda_version": "13.0", "nccl_version": "2.28", ...}
    short = lambda text: ".".join(str(text).split("+")[0].split(".")[:2]) if text else "0.0"  # noqa: E731
    spec = importlib.util.find_spec("torch")
    folders = (spec.submodule_search_locations if spec else None) or [""]
    path = os.path.join(folders[0], "version.py")
    facts = runpy.run_path(path) if folders[0] and os.path.exists(path) else {}
    return {
        "version": short(facts.get("__version__")),
        "cuda_version": short(facts.get("cuda")),
        "nccl_version": nccl_in_use(folders[0]) if facts.get("cuda") else "0.0",
        "hip_version": short(facts.get("hip")),
    }


_info = _build_info()
version = getattr(_info, "version", __version__)
git_hash, git_branch = (_info.git_hash, _info.git_branch) if _info else commit(ROOT)
torch_info = _info.torch_info if _info else _torch_here()
accelerator_name = _info.accelerator_name if _info else ("cuda" if torch_info["cuda_version"] != "0.0" else "cpu")


def __getattr__(name):
    if name in ("installed_ops", "compatible_ops"):
        value = load_target(f"deepspeed.ops.op_builder.status:{name}")()
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
