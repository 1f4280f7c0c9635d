"""bf16 weights, fp32 gradients and masters, states on shares: ``BF16_Optimizer``.

It is ZeRO stage 1 with gradients accumulated in fp32, and saves the same files. ``deepspeed.initialize`` makes one for
bf16 at stage 1 with ``data_types.grad_accum_dtype`` "fp32". Made by hand it works with any training loop: gradients
that plain backwards leave in ``param.grad`` are added to the fp32 ones by ``update_hp_grads``, or by ``step`` itself.
"""

import torch

from deepspeed.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


class BF16_Optimizer(DeepSpeedZeroOptimizer):
    """Wraps ``init_optimizer``, whose parameters are those of a bf16 model ("lp"); fp32 masters and gradients are "hp".

    Arguments as in the contract: ``param_names`` is a dict from parameter to name, ``bfloat16_config`` the section
    ``bf16`` of the configuration, ``clip_grad`` the largest 2-norm of all gradients (0: no limit), ``grad_acc_dtype``
    the dtype of hp gradients. ``norm_type`` other than 2, ``graph_harvesting`` and ``has_moe_layers`` are refused with
    NotImplementedError.
    """

    def __init__(
        self,
        init_optimizer,
        param_names,
        bfloat16_config,
        mpu=None,
        clip_grad=0.0,
        norm_type=2,
        allgather_bucket_size=5000000000,
        dp_process_group=None,
        timers=None,
        grad_acc_dtype=None,
        graph_harvesting=False,
        has_moe_layers=False,
        engine=None,
    ):
        if norm_type != 2:
            raise NotImplementedError(f"BF16_Optimizer: norm_type {norm_type} is not supported; gradients have 2-norms")
        if graph_harvesting:
            raise NotImplementedError("BF16_Optimizer: graph_harvesting is not supported; leave it out")
        if has_moe_layers:
            raise NotImplementedError("BF16_Optimizer: has_moe_layers needs mixture of experts, which is not built yet")
        for position, group in enumerate(init_optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                if param.dtype == torch.float16:
                    raise ValueError(
                        f"BF16_Optimizer: parameter {index} of group {position}, {tuple(param.shape)}, is fp16; call "
                        "model.bfloat16() first, or use fp16 in the configuration"
                    )
        self.bfloat16_config = bfloat16_config
        self.norm_type = norm_type
        super().__init__(
            init_optimizer,
            param_names,
            timers,
            {},
            allgather_bucket_size=allgather_bucket_size,
            dp_process_group=dp_process_group,
            mpu=mpu,
            clip_grad=clip_grad,
            gradient_accumulation_dtype=torch.float32 if grad_acc_dtype is None else grad_acc_dtype,
            partition_grads=False,
            has_moe_layers=has_moe_layers,
            engine=engine,
        )
        if engine is None and bfloat16_config is not None:
            self.stepping.check = bool(bfloat16_config.check_grad_overflow)
        if getattr(bfloat16_config, "immediate_grad_update", False):
            self.create_grad_acc_hooks()

    @property
    def bf16_groups(self):
        return self.bit16_groups

    # ---- gradients on their way from bf16 to fp32 ------------------------------------------------------------------
    def create_grad_acc_hooks(self):
        """From now on a gradient is added to the fp32 ones, and ``.grad`` freed, as soon as backward has made it."""
        self.core.forwarded([], False, 1.0)

    def backward_prologue(self):
        """Before a backward that somebody else runs: ``.grad`` of an earlier one counts, and is free afterwards."""
        super().backward_prologue()

    def backward_epilogue(self, update_hp_grads=True, clear_lp_grads=False, **bwd_kwargs):
        """After it. Without ``update_hp_grads`` what lies in ``.grad`` stays there."""
        super().backward_epilogue(**bwd_kwargs)
        if update_hp_grads:
            self.update_hp_grads(clear_lp_grads=clear_lp_grads)

    @torch.no_grad()
    def update_hp_grads(self, clear_lp_grads=False):
        """Adds what plain backwards have left in ``.grad`` to the fp32 gradients of this rank, and frees it."""
        self._take_lp_grads(range(len(self._params)))

    @torch.no_grad()
    def accumulate_hp_grads_and_remove_lp(self, lp_param, group_idx, param_idx):
        """The same for one parameter: number ``param_idx`` of group ``group_idx``."""
        index = sum(len(group) for group in self.bit16_groups[:group_idx]) + param_idx
        if not 0 <= index < len(self._params) or self._params[index] is not lp_param:
            raise ValueError(f"the parameter {tuple(lp_param.shape)} is not number {param_idx} of group {group_idx}")
        self._take_lp_grads([index])

    def _take_lp_grads(self, wanted):
        wanted = set(wanted)
        others = {p: p.grad for i, p in enumerate(self._params) if i not in wanted and p.grad is not None}
        for param in others:
            param.grad = None
        if self.partition_count[0] == 1:
            # One rank: its gradients are the reduced ones, which .grad would replace.
            used = self.core.used()
            for (index, _, _), grad in zip(self.core.pieces(), self.core.grads(), strict=True):
                param = self._params[index]
                if param.grad is not None and used[index]:
                    grad.add_(param.grad)
                    param.grad = None
        self.core.adopt_grads()
        for param, grad in others.items():
            param.grad = grad

    def get_grads_for_reduction(self):
        """``(gradients, gradients of experts)``: a list of this rank's fp32 gradients, views, and an empty dict."""
        return self.get_grads_for_norm()

    def get_grads_for_norm(self, for_clipping=False):
        """``(gradients, gradients of experts)`` that the norm of this rank's share is made of, and an empty dict."""
        return [grad for grads in self.averaged_gradients.values() for grad in grads], {}

    def clear_hp_grads(self):
        """Forgets the fp32 gradients; what lies in ``.grad`` stays."""
        kept = {param: param.grad for param in self._params if param.grad is not None}
        self.core.clear_grads()
        for param, grad in kept.items():
            param.grad = grad

    @torch.no_grad()
    def clear_lp_grads(self, set_to_none=False):
        """Zeroes ``.grad`` where there is one, or takes it away."""
        for param in self._params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def zero_grad(self, set_to_none=True):
        self.clear_lp_grads(set_to_none=True)
        super().zero_grad(set_to_none=set_to_none)

    def update_lp_params(self):
        """The model's weights take the masters' values, on every rank."""
        self.core.publish()

    # ---- state -----------------------------------------------------------------------------------------------------
    def load_state_dict(
        self,
        state_dict_list,
        checkpoint_folder=None,
        load_optimizer_states=True,
        load_from_fp32_weights=False,
        load_serial=None,
        param_shapes=None,
    ):
        """``state_dict_list`` holds the shards of all ranks that saved, in rank order."""
        super().load_state_dict(
            state_dict_list,
            load_optimizer_states=load_optimizer_states,
            load_from_fp32_weights=load_from_fp32_weights,
            checkpoint_folder=checkpoint_folder,
            load_serial=load_serial,
            param_shapes=param_shapes,
        )
