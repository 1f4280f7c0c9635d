"""What the launcher told this process about its place in the job."""

import os


def _number(name, default):
    text = os.environ.get(name)
    if text is None or text == "":
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"the environment variable {name} is {text!r}; the launcher sets it to a whole number."
        ) from None


def get_local_rank_from_launcher():
    """``LOCAL_RANK``, or Open MPI's; 0 without a launcher."""
    return _number("LOCAL_RANK", _number("OMPI_COMM_WORLD_LOCAL_RANK", 0))


def get_world_rank_from_launcher():
    """``RANK``, or Open MPI's; 0 without a launcher."""
    return _number("RANK", _number("OMPI_COMM_WORLD_RANK", 0))


def get_world_size_from_launcher():
    """``WORLD_SIZE``, or Open MPI's; 1 without a launcher."""
    return _number("WORLD_SIZE", _number("OMPI_COMM_WORLD_SIZE", 1))
