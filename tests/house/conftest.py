"""The tree that the rules are checked on, read once."""

import os

import pytest

import house_cpp
import house_python
from places import ROOT


@pytest.fixture(scope="session")
def modules():
    found = house_python.load(os.path.join(ROOT, "python", "deepspeed"))
    assert len(found) > 20, "the walk over python/deepspeed found next to nothing"
    return found


@pytest.fixture(scope="session")
def files():
    found = house_cpp.sources(os.path.join(ROOT, "csrc"))
    assert len(found) > 20, "the walk over csrc found next to nothing"
    return found
