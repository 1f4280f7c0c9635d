"""Finding inf and nan in gradients, agreed upon by the ranks that step together."""

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.norms import is_moe_param


class CheckOverflow:
    """Asks whether any gradient of any rank concerned holds inf or nan.

    param_groups: lists of parameters for ``check()``.
    mpu:          model-parallel unit: its model-parallel group is asked, whose data-parallel peers hold the same
                  gradients after the reduction.
    zero_reduce_scatter: gradients are shards: all ranks are asked.
    deepspeed:    engine; where it has ``enable_backward_allreduce`` off, ranks still hold gradients of their own, and
                  all are asked.
    """

    def __init__(self, param_groups=None, mpu=None, zero_reduce_scatter=False, deepspeed=None):
        self.mpu = mpu
        self.zero_reduce_scatter = zero_reduce_scatter
        self.deepspeed = deepspeed
        self.params = [p for group in param_groups or [] for p in group]
        self.has_moe_params = any(is_moe_param(p) for p in self.params)

    def check_using_norm(self, norm_group, reduce_overflow=True):
        """Whether a norm of the list is the -1 that stands for inf or nan, here or on a rank concerned."""
        return self._agreed(-1 in norm_group, self.has_moe_params) if reduce_overflow else -1 in norm_group

    def check(self, param_groups=None):
        """`has_overflow` of the parameters given now, or at construction."""
        if param_groups is None:
            return self.has_overflow(self.params, self.has_moe_params)
        params = [p for group in param_groups for p in group]
        return self.has_overflow(params, any(is_moe_param(p) for p in params))

    def has_overflow_serial(self, params):
        """Whether a gradient of this rank holds inf or nan."""
        return any(p.grad is not None and self._has_inf_or_nan(p.grad) for p in params)

    def has_overflow(self, params, has_moe_params=None):
        """Whether a gradient of any rank concerned holds inf or nan; every such rank must call it."""
        if has_moe_params is None:
            has_moe_params = self.has_moe_params
        return self._agreed(self.has_overflow_serial(params), has_moe_params)

    def _agreed(self, overflow, has_moe_params):
        if not dist.is_initialized():
            return bool(overflow)
        flag = torch.tensor([float(overflow)], device=get_accelerator().current_device_name())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group(has_moe_params))
        return bool(flag.item())

    def _group(self, has_moe_params):
        own_gradients = self.deepspeed is not None and not getattr(self.deepspeed, "enable_backward_allreduce", True)
        if self.zero_reduce_scatter or has_moe_params or own_gradients or self.mpu is None:
            return dist.get_world_group()
        return self.mpu.get_model_parallel_group()

    @staticmethod
    def _has_inf_or_nan(x, i=-1):
        values = x.coalesce().values() if x.is_sparse else x
        return not bool(torch.isfinite(values).all())
