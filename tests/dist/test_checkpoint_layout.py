"""Our files hold what the files of another implementation hold for the same model: names, keys, shapes, dtypes."""

import os
import warnings

import pytest
import torch

import peer_model
from deepspeed.checkpoint.layouts import names
from harness import run_ranks


def known(name, path, theirs, ours):
    """Whether a difference is meant, and why."""
    if path[-1] == "step" and theirs is not None and ours is not None:
        return theirs.isdigit() and ours == "4"  # theirs count in one parameter of a group, or the dry run as well
    # Theirs name tied weights in the first rank's file only.
    return path[0] == "shared_params" and name.startswith("zero_pp_rank_1_") and theirs in (None, "[]")


def tree(value, path=()):
    """dict: path -> what stands there: a tensor's shape and dtype, a type, and small plain values."""
    here = {path: type(value).__name__}
    if torch.is_tensor(value):
        return {path: f"tensor {tuple(value.shape)} {value.dtype}"}
    if isinstance(value, dict):
        here[(*path, "#order")] = repr(list(value))
        for key, item in value.items():
            here.update(tree(item, (*path, key)))
    elif isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        here[path] = f"{type(value).__name__} of {len(value)}"
        for index, item in enumerate(value):
            here.update(tree(item, (*path, index)))
    elif hasattr(value, "__dict__") and type(value).__module__.startswith("deepspeed"):
        here[path] = f"{type(value).__module__}.{type(value).__qualname__}"
        here.update(tree(dict(vars(value)), (*path, "vars")))
    elif value is None or isinstance(value, (bool, int, str, torch.Size)):
        here[path] = repr(value)
    return here


def body_save(rank, world, target):
    for stage, dtype in peer_model.KINDS:
        engine = peer_model.make_engine(peer_model.what(stage, dtype)["config"])
        peer_model.train(engine, 4, rank)
        engine.save_checkpoint(os.path.join(target, f"{stage}{dtype}"), client_state={"epoch": 2, "note": "kept"})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    target = tmp_path_factory.mktemp("ours")
    run_ranks(2, body_save, str(target))
    return target


@pytest.mark.sample("values")
@pytest.mark.parametrize("stage, dtype", peer_model.KINDS)
def test_same_files_keys_shapes_and_types(stage, dtype, saved):
    theirs, ours = os.path.join(peer_model.folder(stage, dtype), "global_step4"), saved / f"{stage}{dtype}/global_step4"
    own = {names.RUN_STATES(rank=rank) for rank in range(2)}
    assert own <= set(os.listdir(ours))
    assert {name for name in os.listdir(ours) if name.endswith(".pt")} - own == set(os.listdir(theirs))
    different = []
    for name in sorted(os.listdir(theirs)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            a, b = (tree(torch.load(os.path.join(one, name), weights_only=False)) for one in (theirs, ours))
        for path in [*a, *(path for path in b if path not in a)]:
            if a.get(path) != b.get(path) and not known(name, path, a.get(path), b.get(path)):
                different.append(f"{name} {'.'.join(map(str, path))}: theirs {a.get(path)}, ours {b.get(path)}")
    assert not different, "\n".join(different)
