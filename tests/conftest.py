"""For every test: the package of this tree comes first, and the helpers of other folders can be imported."""

import os
import sys

import pytest

TESTS = os.path.dirname(os.path.abspath(__file__))
for folder in (
    os.path.join(TESTS, "dist"),
    os.path.join(TESTS, "house"),
    os.path.join(TESTS, "python", "ops"),
    os.path.join(TESTS, "python", "checkpoint"),
    os.path.join(os.path.dirname(TESTS), "python"),
):
    if folder not in sys.path:
        sys.path.insert(0, folder)

import harness  # noqa: E402  (the path above makes it importable)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    harness.shutdown()


def pytest_collection_modifyitems(items):
    """Everything in tests/dist starts several processes: `make test-unit` leaves it out."""
    for item in items:
        if os.path.dirname(str(item.path)) == os.path.join(TESTS, "dist"):
            item.add_marker(pytest.mark.dist)
