"""For every test: the package of this tree comes first, and the helpers of tests/dist can be imported."""

import os
import sys

import pytest

TESTS = os.path.dirname(os.path.abspath(__file__))
for folder in (os.path.join(TESTS, "dist"), os.path.join(os.path.dirname(TESTS), "python")):
    if folder not in sys.path:
        sys.path.insert(0, folder)

import harness  # noqa: E402  (the path above makes it importable)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    harness.shutdown()
