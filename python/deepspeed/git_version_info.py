"""Version and origin of this build, under the names that scripts import."""

import importlib
import importlib.util

from deepspeed.version import __version__

version = __version__


def _build_info():
    # Written by the build into the installed package; a source tree that was only put on the path has none.
    return (
        importlib.import_module("deepspeed._build_info") if importlib.util.find_spec("deepspeed._build_info") else None
    )


_info = _build_info()
git_hash = getattr(_info, "git_hash", "unknown")
git_branch = getattr(_info, "git_branch", "unknown")
torch_info = getattr(_info, "torch_info", {"version": "0.0", "cuda_version": "0.0", "hip_version": "0.0"})
