"""Import path of existing scripts."""

from deepspeed.data.random_ltd import (  # noqa: F401
    convert_to_random_ltd,
    remove_random_ltd_state_dict,
    save_without_random_ltd,
)
