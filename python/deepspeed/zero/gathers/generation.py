"""A trained model for generation: whole parameters for as long as many short forwards run."""

import contextlib

from deepspeed.zero.gathers.gathered import GatheredParameters
from deepspeed.zero.parameters.sharded_parameter import is_sharded


@contextlib.contextmanager
def unwrap_model_for_generation(model):
    """Yields the module inside ``model`` (an engine, or a module), with all parameters gathered and no hooks.

    At ZeRO stage 3 it holds the whole model on every rank that enters: gathered once, where a generation loop would
    gather for every token. Ranks may generate different lengths. Below stage 3 it only yields the module.
    """
    module = getattr(model, "module", model)
    optimizer = getattr(model, "optimizer", None)
    offload = getattr(optimizer, "parameter_offload", optimizer if hasattr(optimizer, "forward_hooks") else None)
    sharded = [param for param in module.parameters() if is_sharded(param)]
    with GatheredParameters(sharded):
        if offload is not None:
            offload.hooks.remove(module)
        try:
            yield module
        finally:
            if offload is not None:
                offload.setup_zero_stage3_hooks()
