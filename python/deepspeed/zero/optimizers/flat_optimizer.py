"""The optimizer object of ZeRO stages 1 and 2: all parameters end to end in one flat space, cut into shares."""

import collections

import torch

from deepspeed import _native
from deepspeed import comm as dist
from deepspeed.config.sections import ZeroStageEnum
from deepspeed.log import log_dist
from deepspeed.utils import groups
from deepspeed.utils.folded_gradients import sum_partial_gradients
from deepspeed.utils.forwarding import answers_from
from deepspeed.utils.tensor_fragment import fragment_address
from deepspeed.version import __version__
from deepspeed.zero.optimizers.inner_states import InnerStates, per_element
from deepspeed.zero.optimizers.sharded_optimizer import ShardedOptimizer
from deepspeed.zero.parameters.param_ranks import ranks_of
from deepspeed.zero.parameters.tensor_of_pieces import TensorOfPieces
from deepspeed.zero.states.fragments import put_fragments
from deepspeed.zero.states.named_states import OWN_PARAMS, OwnedStates


# The model's weights take the masters' values, on every rank.
@answers_from({"update_lp_params": "core.publish()"})
class FlatOptimizer(ShardedOptimizer):
    """Stage 2 with ``partition_grads``, else stage 1. The base class tells of the other arguments.

    Saved states use the layout that other tools read: each group's parameters end to end in the optimizer's order, cut
    into equal partitions, one for each rank (csrc/zero/states/group_cut.h). ``elastic_checkpoint``: its old form.
    ``saved_form(shards, shapes)`` makes a ``SavedState`` of them.
    """

    ds_version = __version__

    def __init__(self, *args, partition_grads, elastic_checkpoint, **core_options):
        self.stage = 2 if partition_grads else 1
        self.partition_gradients = partition_grads
        self.elastic_checkpoint = bool(elastic_checkpoint)
        super().__init__(*args, **core_options)
        put_fragments(self)

    # ---- the saved layout --------------------------------------------------------------------------------------------
    def state_dict(self):
        """This rank's shard. Every rank calls it; see ``docs/tutorials/checkpoints.md`` for the keys."""
        return self._saved_state(in_pieces=False)

    def state_dict_in_pieces(self):
        """The same for writing it down: with ``TensorOfPieces`` over the memory of what is trained instead of tensors,
        where that is possible. Write it, or copy it, before the next step."""
        return self._saved_state(in_pieces=True)

    def _saved_state(self, in_pieces):
        cuts = [_native._C.GroupCut(self.core, group) for group in range(len(self.bit16_groups))]
        inner, steps, states, masters = InnerStates(self), self._steps(), {}, []

        def take(cut, kind, numel):
            """The first ``numel`` elements of this rank's partition, fp32, padding zero, on the CPU. With ``in_pieces``
            without a copy where that can be: what rests in files, and what is in memory on one rank. All call it."""
            kept = self.stepping.kept().get(kind)
            source = cut.source(self.core, *kept, numel) if in_pieces and kept is not None else None
            if source is not None:
                wide = source.bytes > 4 * numel
                return TensorOfPieces(numel, torch.float64 if wide else torch.float32, source=source)
            pieces = self.own_tensors(kind)
            parts = cut.in_pieces(pieces, numel) if in_pieces else None
            return cut.partition(pieces)[:numel] if parts is None else TensorOfPieces(numel, torch.float32, parts)

        for group, cut in enumerate(cuts):
            in_row = [ranks_of(param) is None for param in self.bit16_groups[group]]
            dense = [cut.first + index for index, row in enumerate(in_row) if row]
            states[group] = inner.of_group(group, dense, [steps[index] for index in dense])
            states[group].update({kind: take(cut, kind, cut.size) for kind in inner.kinds[group]})
            masters.append(take(cut, "fp32", cut.owned))
        state = self._common_state()
        state.update(
            {
                "clip_grad": self.clip_grad,
                **(self._elastic(states, cuts) if self.elastic_checkpoint else self._inner_state_dict(states)),
                "single_partition_of_fp32_groups": masters,
                "zero_stage": ZeroStageEnum(self.stage),
                "group_paddings": [cut.size - cut.owned for cut in cuts],
                "partition_count": self.partition_count,
                "ds_version": __version__,
                "param_slice_mappings": [
                    collections.OrderedDict(
                        (self.stepping.names[index], fragment_address(numel=numel, start=start))
                        for index, start, numel in cut.slices()
                    )
                    for cut in cuts
                ],
            }
        )
        own = OwnedStates(self.stepping, self.bit16_groups).by_name(in_pieces=in_pieces)
        return state if own is None else {**state, OWN_PARAMS: own}

    def _inner_state_dict(self, states):
        groups = [{**args, "params": [index]} for index, args in enumerate(self._group_args())]
        return {"base_optimizer_state": {"state": states, "param_groups": groups}}

    @staticmethod
    def _elastic(states, cuts):
        """The old form: a list of each group's states, without padding and without hyperparameters."""
        lean = [
            {key: value[: cuts[group].owned] if per_element(value) else value for key, value in state.items()}
            for group, state in states.items()
        ]
        steps = [state["step"] for state in lean if "step" in state]
        return {"base_optimizer_state": lean, "base_optimizer_state_step": max(steps, default=0)}

    def configure_autoep_folding_tp_gradient_reduction(self, folding_spec):
        """Sums the gradients of trained parameters that are marked as partial
        (``deepspeed.module_inject.auto_ep_folding``) over the tensor-parallel ranks, from now on; an engine with the
        sections ``tensor_parallel`` and ``expert_parallel`` does so by itself. ``folding_spec``: a
        ``ParallelFoldingSpec``; with None or one tensor-parallel rank nothing happens. ValueError where its ``tp_size``
        is not that of the job. Every tensor-parallel rank calls it."""
        if folding_spec is None or folding_spec.tp_size == 1:
            return
        group = groups.get_tensor_model_parallel_group()
        ranks = dist.get_world_size(group)
        if ranks != folding_spec.tp_size:
            raise ValueError(f"folding_spec has tp_size={folding_spec.tp_size}, and {ranks} ranks cut layers here")
        sum_partial_gradients(zip(self.stepping.names, self._params), folding_spec, group)

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
        """Reduces the remaining gradients after a backward that the engine has not run."""
        super().backward_epilogue()

    def is_moe_group(self, group):
        """Whether a group is one of experts' parameters (``deepspeed.moe.utils`` marks them)."""
        return group.get("moe", False)

    def get_ep_ranks(self, rank=0, group_name=None):
        """The ranks that hold the same experts as this one, of layers whose groups are called ``group_name``."""
        return groups._get_expert_data_parallel_group_ranks(group_name)

    def print_rank_0(self, message):
        """Logs ``message`` on rank 0."""
        log_dist(message, ranks=[0])

    def scaled_global_norm(self, norm_type=2):
        """2-norm of the gradients of the last step, times the loss scale."""
        return None if self.stepping.norm is None else self.stepping.norm * self.loss_scale
