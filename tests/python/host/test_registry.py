"""Registries: lazy targets, probes, detection, plug-ins by entry point, and errors that help."""

import pytest

from deepspeed.registry import Registry, UnknownNameError
from processes import run_python
from refusals import refused


@pytest.fixture
def fruits():
    made = Registry("fruit")
    made.register("apple", "collections:OrderedDict")
    made.register("banana", "os:path.join", probe=lambda: "not ripe", priority=9)
    made.register("cherry", "no.such.module:x", probe=lambda: True, priority=5)
    made.register("date", "os:sep", probe="os.path:isdir")  # a probe that fails to be called
    return made


def test_targets_are_imported_when_asked_for(fruits):
    import collections
    import os

    assert fruits.get("apple") is collections.OrderedDict and fruits.get("banana") is os.path.join
    refused(ModuleNotFoundError, "no", fruits.get, "cherry")


def test_detection_takes_the_best_that_works(fruits):
    assert fruits.detect() == "cherry" and fruits.why_not("banana") == "not ripe" and fruits.why_not("apple") == ""
    assert "TypeError" in fruits.why_not("date")
    assert Registry("thing").detect() is None


def test_unknown_names_list_the_known_ones_and_the_nearest(fruits):
    refused(
        UnknownNameError, "no fruit named 'bananna'.*apple, banana, cherry, date.*mean 'banana'", fruits.get, "bananna"
    )
    assert issubclass(UnknownNameError, ValueError)


def test_names_are_taken_once(fruits):
    refused(
        ValueError, "'apple' is registered already.*OrderedDict.*Choose another", fruits.register, "apple", "os:sep"
    )


def test_bad_target():
    made = Registry("fruit")
    made.register("x", "os.path.join")
    refused(ValueError, "package.module:attribute", made.get, "x")


def test_plug_ins_join_by_entry_point(tmp_path, monkeypatch):
    (tmp_path / "kiwi_plugin.py").write_text("class Kiwi: pass\ndef probe(): return True\n")
    (tmp_path / "lime_plugin.py").write_text("raise ImportError('no driver')\n")
    info = tmp_path / "kiwi-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kiwi\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[test.fruits]\nkiwi = kiwi_plugin:Kiwi\nlime = lime_plugin:Lime\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Registry("fruit", group="test.fruits")
    made.register("apple", "os:sep", priority=50)
    assert made.names() == ["apple", "kiwi", "lime"] and made.get("kiwi").__name__ == "Kiwi"
    assert "no driver" in made.why_not("lime") and made.detect() == "kiwi"


def test_registry_and_log_know_no_torch():
    asked = run_python("import sys; import deepspeed.registry, deepspeed.log; print('torch' in sys.modules)")
    assert asked.stdout.strip() == "False", asked.stderr
