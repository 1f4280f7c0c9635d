"""Random numbers of the device."""

import torch

manual_seed, manual_seed_all, initial_seed, get_rng_state, set_rng_state, default_generators = (
    getattr(torch.hpu, name)
    for name in (
        "manual_seed", "manual_seed_all", "initial_seed", "get_rng_state", "set_rng_state", "default_generators",
    )
)  # fmt: skip
