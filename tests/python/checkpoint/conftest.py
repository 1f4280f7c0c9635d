"""No test of this folder leaves a fault for the next one."""

import pytest

from deepspeed.checkpoint.write import file_writer


@pytest.fixture(autouse=True)
def inject():
    """The function that orders faults of reading and writing."""
    yield file_writer.inject_fault
    file_writer.inject_fault("")
