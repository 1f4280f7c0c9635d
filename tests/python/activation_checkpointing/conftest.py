import pytest

from deepspeed.activation_checkpointing import settings
from deepspeed.utils.random_state import get_cuda_rng_tracker


@pytest.fixture(autouse=True)
def nothing_configured():
    """Options are those of the process: each test begins and ends without any."""
    settings.forget()
    get_cuda_rng_tracker().reset()
    yield
    settings.forget()
    get_cuda_rng_tracker().reset()
