"""Parameters that ``zero.Init`` has sharded become whole, before their layers are cut over ranks."""

from deepspeed.moe.replaced import whole_copy
from deepspeed.zero.parameters.sharded_parameter import is_sharded


def unshard(module):
    """Replaces the sharded parameters of ``module`` by whole ones on every rank. Every rank of the job calls it. A
    replaced parameter names its replacement (``ds_replaced_by``, see ``moe/replaced.py``)."""
    for owner in module.modules():
        for name, old in owner._parameters.items():
            if old is None or not is_sharded(old):
                continue
            if not hasattr(old, "ds_replaced_by"):  # modules may share it
                old.ds_replaced_by = (whole_copy(old),)
            owner._parameters[name] = old.ds_replaced_by[0]
