"""SGD with momentum whose step is one native call per parameter group.

``"SGD"`` as the config's ``optimizer.type`` is torch's class; ours is passed to ``initialize`` as an object.
"""

from deepspeed.ops.sgd.fused_sgd import FusedSGD

__all__ = ["FusedSGD"]
