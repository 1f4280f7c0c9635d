"""Parameters that ``zero.Init`` has sharded become whole, before their layers are cut over ranks."""

import torch

from deepspeed.zero.gathers.gathered import GatheredParameters
from deepspeed.zero.parameters.sharded_parameter import is_sharded


@torch.no_grad()
def unshard(module):
    """Replaces the sharded parameters of ``module`` by whole ones on every rank. Every rank of the job calls it. A
    replaced parameter names its replacement (``ds_replaced_by``, see ``moe/replaced.py``)."""
    for owner in module.modules():
        for name, old in owner._parameters.items():
            if old is None or not is_sharded(old):
                continue
            if not hasattr(old, "ds_replaced_by"):  # modules may share it
                with GatheredParameters([old]):
                    new = torch.nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
                kept = {key: value for key, value in vars(old).items() if not key.lstrip("_").startswith("ds_")}
                vars(new).update(kept)
                old.ds_replaced_by = (new,)
            owner._parameters[name] = old.ds_replaced_by[0]
