"""The architecture of docs/architecture.md, checked on this tree. Each message says what is wrong, why, and the fix."""

import os

import pytest

import house_cpp
import house_names
import house_python
from places import ROOT


@pytest.fixture(scope="module")
def modules():
    found = house_python.load(os.path.join(ROOT, "python", "deepspeed"))
    assert len(found) > 20, "the walk over python/deepspeed found next to nothing"
    return found


@pytest.fixture(scope="module")
def files():
    found = house_cpp.sources(os.path.join(ROOT, "csrc"))
    assert len(found) > 20, "the walk over csrc found next to nothing"
    return found


@pytest.fixture(scope="module")
def cmake():
    with open(os.path.join(ROOT, "CMakeLists.txt"), encoding="utf-8") as file:
        return file.read()


def expect_none(problems):
    assert not problems, "\n\n" + "\n\n".join(problems)


@pytest.mark.parametrize(
    "check",
    [
        house_python.check_arrows,
        house_python.check_cycles,
        house_python.check_imports_at_top,
        house_python.check_head_node,
        house_python.check_facades,
        house_python.check_groups,
        house_names.check_joined,
    ],
    ids=lambda check: check.__name__[len("check_") :],
)
def test_python(modules, check):
    expect_none(check(modules))


def test_rooms_of_cmake(cmake):
    folders = [
        name for name in os.listdir(os.path.join(ROOT, "csrc")) if os.path.isdir(os.path.join(ROOT, "csrc", name))
    ]
    expect_none(house_cpp.check_cmake(cmake, folders))


def test_names_that_become_paths_in_cpp(files):
    expect_none(house_names.check_joined_cpp(files))


def test_includes(files, cmake):
    expect_none(house_cpp.check_includes(files, cmake))


def test_torch_versions(files):
    expect_none(house_cpp.check_torch_versions(files))


def test_mutable_globals(files):
    expect_none(house_cpp.check_mutable_globals(files))
