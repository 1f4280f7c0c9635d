"""No file, however it was made, runs anything or takes the process down: it is refused with an error that says why."""

import json
import os
import subprocess
import sys

import pytest
import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import hostile_pickles  # noqa: E402

from places import PYTHON


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """All attacks are read by one other process, with a gigabyte of memory to spare: a crash must not be pytest's."""
    folder = tmp_path_factory.mktemp("hostile")
    torch.save({"x": torch.zeros(3)}, folder / "plain.pt")
    for name, make in hostile_pickles.ATTACKS.items():
        (folder / f"{name}.pt").write_bytes(make())
    paths = [str(folder / "plain.pt"), *(str(folder / f"{name}.pt") for name in hostile_pickles.ATTACKS)]
    found = subprocess.run(
        [sys.executable, hostile_pickles.__file__, *paths],
        cwd=folder,
        env={**os.environ, "DS_PYTHON": PYTHON, "DS_CHECKPOINT_TRUST": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    results = {}
    for line in found.stdout.splitlines():
        entry = json.loads(line)
        results.setdefault(os.path.basename(entry["path"])[:-3], []).append(entry)
    results["end"] = found.returncode, found.stderr[-2000:], os.path.exists(folder / hostile_pickles.MARK)
    return results


def test_the_corpus_is_large_and_the_reader_survives_it(outcomes):
    assert len(hostile_pickles.ATTACKS) >= 150
    code, errors, mark = outcomes["end"]
    assert code == 0, errors
    assert not mark


@pytest.mark.parametrize("name", sorted(hostile_pickles.ATTACKS))
def test_nothing_runs_and_the_error_is_clean(name, outcomes):
    assert name in outcomes, f"the reader died: {outcomes['end']}"
    entries = [entry for entry in outcomes[name] if entry["reader"] == "package"]
    assert len(entries) == 2
    for entry in entries:
        assert not entry["heard"]
        assert "pickle.UnpicklingError" in entry["outcome"] or "zipfile.BadZipFile" in entry["outcome"], entry
        assert entry["said"] and len(entry["said"]) < 1000 and entry["seconds"] < 5


@pytest.mark.parametrize("name", sorted(hostile_pickles.ATTACKS))
def test_the_reader_without_the_package_runs_nothing_either(name, outcomes):
    """It reads some of these: what it has no use for, it does not make. Nothing happens, and soon."""
    (entry,) = [entry for entry in outcomes[name] if entry["reader"] == "standalone"]
    assert not entry["heard"] and entry["seconds"] < 5
    kinds = ("pickle.UnpicklingError", "zipfile.BadZipFile", "loaded ")
    assert any(kind in entry["outcome"] for kind in kinds), entry


@pytest.mark.parametrize(
    "name", ["os_system", "eval", "inst", "stack_global", "legacy_runs", "a_class_with_its_own_say"]
)
def test_a_refusal_names_class_file_and_the_ways_to_let_it_through(name, outcomes):
    for entry in outcomes[name]:
        assert "RefusedClass" in entry["outcome"] and entry["path"] in entry["said"]
        assert all(way in entry["said"] for way in ("allow=[", "trust_pickles", "DS_CHECKPOINT_TRUST=1"))
    assert "os.system" in outcomes["os_system"][0]["said"]
