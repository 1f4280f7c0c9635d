"""After ``import deepspeed`` alone every published module is reached by its dotted path, as accelerate's
``deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES`` or lightning's ``deepspeed.utils.logging.logger``."""

import json
import os
import pathlib
import sys

import pytest

from deepspeed.registry import lazy_package

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

from processes import run_after_torch, succeeded  # noqa: E402
from refusals import refused  # noqa: E402
from surface_tables import LATER  # noqa: E402

# One process per module: what is imported for one must not help the next. They are forked after torch's import.
WALK = """
import importlib, os, sys
import torch.distributed
import deepspeed

for path in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        found = deepspeed
        try:
            for part in path.split(".")[1:]:
                found = getattr(found, part)
            # Some names are a file and what it defines (deepspeed.utils.tensor_fragment); the latter is meant.
            module = importlib.import_module(path)
            assert found is module or found is getattr(module, path.split(".")[-1]), found
        except Exception as error:
            print(path, type(error).__name__, error, flush=True)
            os._exit(1)
        os._exit(0)
    os.waitpid(child, 0)
"""


def walk(paths):
    return succeeded(run_after_torch(WALK, *paths)).stdout


def test_paths_that_clients_write():
    paths = ["deepspeed.runtime.lr_schedules", "deepspeed.utils.logging", "deepspeed.runtime.zero.partition_parameters"]
    assert walk(paths) == ""


@pytest.mark.slow
def test_every_published_module():
    surface = json.loads(pathlib.Path(HERE, "data", "api_surface.json").read_text(encoding="utf-8"))
    published = set(surface) - {name for names in LATER.values() for name in names}
    # An attribute that is another module: there is no such file to import.
    assert walk(sorted(published - {"deepspeed.checkpointing"})) == ""


def test_lazy_package(tmp_path, monkeypatch):
    package = tmp_path / "lazy_things"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from deepspeed.registry import lazy_package\n"
        "__getattr__, __dir__ = lazy_package(__name__, {'Thing': 'lazy_things.box'}, otherwise=dict(a=1).__getitem__)\n"
    )
    (package / "box.py").write_text("class Thing: pass\n")
    (package / "attic.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    import lazy_things

    assert "lazy_things.box" not in sys.modules
    assert lazy_things.Thing is sys.modules["lazy_things.box"].Thing and "Thing" in vars(lazy_things)
    assert lazy_things.attic is sys.modules["lazy_things.attic"] and lazy_things.a == 1
    assert {"Thing", "attic"} <= set(dir(lazy_things))
    with pytest.raises(AttributeError):
        lazy_things.__wrapped__  # noqa: B018
    get, _ = lazy_package("lazy_things")
    refused(AttributeError, "module 'lazy_things' has no attribute 'cellar'", get, "cellar")
