"""The optimizer object of ZeRO stages 1 and 2."""

import collections

import torch

from deepspeed import comm as dist
from deepspeed.log import log_dist
from deepspeed.utils.tensor_fragment import fragment_address
from deepspeed.version import __version__
from deepspeed.zero.fragments import put_fragments
from deepspeed.zero.sharded_optimizer import ShardedOptimizer


class DeepSpeedZeroOptimizer(ShardedOptimizer):
    """Stage 2 with ``partition_grads``, else stage 1. Arguments as in the contract; the engine passes itself.

    Saved states use the layout that other tools read: every group's parameters end to end, unpadded, cut into as many
    equal pieces as there are ranks. So files of any number of ranks load into any number of ranks.
    """

    def __init__(
        self,
        init_optimizer,
        param_names,
        timers,
        optimizer_params,
        static_loss_scale=1.0,
        dynamic_loss_scale=False,
        dynamic_loss_args=None,
        verbose=True,
        contiguous_gradients=True,
        reduce_bucket_size=500000000,
        use_multi_rank_bucket_allreduce=True,
        allgather_bucket_size=5000000000,
        dp_process_group=None,
        expert_parallel_group=None,
        expert_data_parallel_group=None,
        reduce_scatter=True,
        overlap_comm=False,
        offload_optimizer_config=None,
        zenflow_config=None,
        mpu=None,
        clip_grad=0.0,
        gradient_accumulation_dtype=torch.float32,
        communication_data_type=torch.float16,
        postscale_gradients=True,
        gradient_predivide_factor=1.0,
        gradient_average=True,
        gradient_accumulation_steps=1,
        ignore_unused_parameters=True,
        partition_grads=True,
        round_robin_gradients=False,
        has_moe_layers=False,
        fp16_master_weights_and_gradients=False,
        bf16_master_weights_and_gradients=False,
        bf16_optimizer_states=False,
        elastic_checkpoint=False,
        check_grad_overflow=True,
        engine=None,
    ):
        params = [param for group in init_optimizer.param_groups for param in group["params"]]
        narrow = [p.dtype for p in params if p.dtype in (torch.float16, torch.bfloat16)]
        self.stage = 2 if partition_grads else 1
        self.partition_gradients = partition_grads
        world = dist.get_world_size(dp_process_group) if dp_process_group is not None else 1
        self._build(
            init_optimizer,
            engine,
            narrow[0] if narrow else torch.float32,
            param_names,
            (static_loss_scale, dynamic_loss_scale, dynamic_loss_args),
            clip_grad,
            {
                "data_parallel": dp_process_group,
                "stage": self.stage,
                "grad_dtype": gradient_accumulation_dtype,
                "bucket_numel": reduce_bucket_size,
                "allgather_bucket_numel": allgather_bucket_size,
                "overlap": overlap_comm,
                "scatter": reduce_scatter,
                "postscale": 1.0 / world,
            },
        )
        put_fragments(self)

    # ---- the saved layout --------------------------------------------------------------------------------------------
    def _group_layout(self, group):
        """``(first parameter index, numels, elements per rank, padding)`` of a group in the saved layout."""
        first = sum(len(g) for g in self.bit16_groups[:group])
        numels = [p.numel() for p in self.bit16_groups[group]]
        count = self.partition_count[group]
        total = sum(numels)
        size = -(-total // count)
        return first, numels, size, size * count - total

    def _saved_partition(self, group, kind):
        """This rank's part of a group in the saved layout, fp32, without padding. Every rank calls it."""
        first, numels, size, _ = self._group_layout(group)
        begin, end = self.rank_in_partitions * size, (self.rank_in_partitions + 1) * size
        parts, offset = [], 0
        for index, numel in enumerate(numels, first):
            whole = self.full_tensor(index, kind)  # all ranks take part, whoever needs it
            low, high = max(begin, offset), min(end, offset + numel)
            if whole is not None and low < high:
                parts.append(whole.reshape(-1)[low - offset : high - offset].cpu())
            elif low < high:
                parts.append(torch.zeros(high - low))
            offset += numel
        return torch.cat(parts) if parts else torch.zeros(0)

    def state_dict(self):
        """This rank's shard. Every rank calls it; see ``docs/tutorials/checkpoints.md`` for the keys."""
        state = self._common_state()
        inner = {}
        for group in range(len(self.bit16_groups)):
            steps = state["param_steps"]
            first, numels, _, _ = self._group_layout(group)
            inner[group] = {name: self._saved_partition(group, name) for name in self._state_names_of(group)}
            inner[group]["step"] = max([steps[first + i] for i in range(len(numels))], default=0)
        groups = [{**args, "params": [index]} for index, args in enumerate(self._group_args())]
        layouts = [self._group_layout(group) for group in range(len(self.bit16_groups))]
        last = self.rank_in_partitions == self.partition_count[0] - 1 if layouts else True
        state.update(
            {
                "clip_grad": self.clip_grad,
                "base_optimizer_state": {"state": inner, "param_groups": groups},
                "single_partition_of_fp32_groups": [
                    self._saved_partition(group, "fp32") for group in range(len(self.bit16_groups))
                ],
                "group_paddings": [padding if last else 0 for _, _, _, padding in layouts],
                "partition_count": self.partition_count,
                "param_slice_mappings": [self._slice_mapping(group) for group in range(len(self.bit16_groups))],
            }
        )
        return state

    def _state_names_of(self, group):
        """Names of the states of a group: groups of a native optimizer may have different ones."""
        if self.stepping.fused is None:
            return self.state_names()
        return list(self.optimizer.slots_of(self.optimizer.param_groups[group]))

    def _slice_mapping(self, group):
        first, numels, size, _ = self._group_layout(group)
        begin, end = self.rank_in_partitions * size, (self.rank_in_partitions + 1) * size
        found, offset = collections.OrderedDict(), 0
        for index, numel in enumerate(numels, first):
            low, high = max(begin, offset), min(end, offset + numel)
            if low < high:
                found[self._names[index]] = fragment_address(numel=high - low, start=low - begin)
            offset += numel
        return found

    def load_state_dict(
        self,
        state_dict_list,
        load_optimizer_states=True,
        load_from_fp32_weights=False,
        checkpoint_folder=None,
        load_serial=None,
        param_shapes=None,
    ):
        """``state_dict_list`` holds the shards of all ranks that saved, in rank order; any number of them.

        Without ``load_from_fp32_weights`` the masters are taken from the model's own weights. Raises ValueError where
        groups or sizes do not fit.
        """
        saved = list(state_dict_list) if isinstance(state_dict_list, (list, tuple)) else [state_dict_list]
        self._load_common(saved[0], load_optimizer_states)
        self.clip_grad = saved[0].get("clip_grad", self.clip_grad)
        masters = [shard["single_partition_of_fp32_groups"] for shard in saved]
        if len(masters[0]) != len(self.bit16_groups):
            raise ValueError(
                f"the saved optimizer has {len(masters[0])} parameter groups, this one has {len(self.bit16_groups)}"
            )
        for group in range(len(self.bit16_groups)):
            if load_from_fp32_weights:
                self._spread(group, "fp32", [shard[group] for shard in masters], "the fp32 weights")
            if load_optimizer_states:
                self._load_group(group, [shard["base_optimizer_state"] for shard in saved])
        if not load_from_fp32_weights:
            self.core.refresh_master()
        self.core.publish()

    def _load_group(self, group, shards):
        own = self.optimizer.param_groups[group]
        own.update({k: v for k, v in shards[0]["param_groups"][group].items() if k != "params"})
        states = [shard["state"].get(group, {}) for shard in shards]
        for name in states[0]:
            if torch.is_tensor(states[0][name]) and states[0][name].dim() > 0:
                self._make_states(group, name)
                self._spread(group, name, [state[name] for state in states], f"state '{name}'")
        if self.stepping.fused is None and "step" in states[0]:
            for master in own["params"]:
                self._set_step(self.optimizer.state[master], states[0]["step"])

    @staticmethod
    def _set_step(state, step):
        state["step"] = torch.tensor(float(step)) if torch.is_tensor(state.get("step", torch.zeros(1))) else step

    def _make_states(self, group, name):
        if self.stepping.fused is not None:
            return
        for master in self.optimizer.param_groups[group]["params"]:
            state = self.optimizer.state[master]
            if name not in state:
                state[name] = torch.zeros_like(master)

    def _spread(self, group, kind, shards, what):
        first, numels, _, _ = self._group_layout(group)
        flat = torch.cat([shard.reshape(-1) for shard in shards])
        if flat.numel() < sum(numels):
            raise ValueError(
                f"{what} of group {group}: {flat.numel()} elements are saved, the model has {sum(numels)}; the "
                "checkpoint is of another model, or shards are missing"
            )
        offset = 0
        for index, numel in enumerate(numels, first):
            param = self._params[index]
            self.set_full_tensor(index, kind, flat[offset : offset + numel].reshape(param.shape))
            offset += numel

    def get_bit16_param_group(self, group_no):
        """The parameters of a group, as the model computes with them."""
        return self.bit16_groups[group_no]

    def reduce_gradients(self, pipeline_parallel=False):
        """Reduces what backward has left on this rank."""
        self.core.finish_backward()

    def reduce_ipg_grads(self, comm_dtype=None):
        """The same; gradients travel in the engine's communication dtype, which ``comm_dtype`` must name if given."""
        if comm_dtype is not None and comm_dtype != self.get_param_comm_dtype(self._params[0]):
            raise ValueError(f"gradients travel in {self.get_param_comm_dtype(self._params[0])}, not {comm_dtype}")
        self.core.finish_backward()

    def backward_epilogue(self, *args, **kwargs):
        """After a backward that somebody else runs: what has not been reduced is."""
        super().backward_epilogue()

    def get_param_id(self, param):
        """The number of ``param`` among the optimizer's parameters, end to end over its groups."""
        return param._ds_link.index

    def print_rank_0(self, message):
        """Logs ``message`` on rank 0."""
        log_dist(message, ranks=[0])

    def update_lp_params(self):
        """The model's weights take the masters' values, on every rank."""
        self.core.publish()

    def scaled_global_norm(self, norm_type=2):
        """2-norm of the gradients of the last step, times the loss scale."""
        return None if self.stepping.norm is None else self.stepping.norm * self.loss_scale

    @property
    def ds_version(self):
        return __version__
