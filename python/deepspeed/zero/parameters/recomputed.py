"""Frozen sharded parameters that a checkpointed segment saves when it runs again."""

import torch

from deepspeed._compat import recomputation_hooks

_torch_hooks = recomputation_hooks()
if _torch_hooks is not None:

    class RecomputationHooks(_torch_hooks):
        """torch's hooks, which keep a tensor that needs no gradient itself. A frozen parameter is released when its
        module has run, long before the segment's backward, and its shape, which torch compares, and its values go
        with it. So it is kept as other parameters are: detached, with its values, until that backward has used it."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            keep = self.pack_hook
            self.pack_hook = lambda tensor: keep(tensor.detach() if isinstance(tensor, torch.nn.Parameter) else tensor)


def keep_values_in_recomputed_segments():
    """From now on ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`` keeps values of frozen parameters."""
    if _torch_hooks is not None:
        torch.utils.checkpoint._recomputation_hook = RecomputationHooks
