"""The optimizer object of ZeRO stage 3: every parameter is cut into slices, one for each rank."""

import os

import torch

from deepspeed import comm as dist
from deepspeed._native import _C
from deepspeed.config.sections import ZeroStageEnum
from deepspeed.formats import torch_archive
from deepspeed.utils.forwarding import answers_from, forwarded
from deepspeed.zero.core import writing
from deepspeed.zero.engine_links import EngineLink
from deepspeed.zero.optimizers.flat_states import with_states
from deepspeed.zero.optimizers.inner_states import InnerStates
from deepspeed.zero.optimizers.sharded_optimizer import ShardedOptimizer
from deepspeed.zero.parameters.param_ranks import ranks_of
from deepspeed.zero.parameters.tensor_of_pieces import TensorOfPieces
from deepspeed.zero.states.named_states import OWN_PARAMS, OwnedStates, groups_of_params
from deepspeed.zero.states.param_values import ParamValues


# Releases gathered parameters that are not in use, and the memory kept for gathers; also before parameters are saved or
# loaded slice by slice. The epilogue reduces the remaining gradients after a backward that the engine has not run.
@answers_from(
    {
        "backward_epilogue": "core.end_backward()",
        "empty_partition_cache": "parameter_offload.empty_partition_cache()",
        "checkpoint_event_prologue": "empty_partition_cache()",
    }
)
class SlicedOptimizer(ParamValues, ShardedOptimizer):
    """Parameters, gradients and states are slices; modules gather what they need while they run.

    Source of the method: Rajbhandari et al., "ZeRO-Infinity" (SC 2021), section 5. ``sub_group_size``: elements of a
    flat tensor of the saved state, at most. ``gathering(core)`` makes the ``ModelGathering``. The base class tells of
    the other arguments. ``saved_form(shards, shapes)`` makes a ``SavedState`` of saved states, and
    ``own_slices(shard, rank, count)`` stands for shards of which only one is here.
    """

    stage = 3

    def __init__(self, module, *args, sub_group_size, gathering, **core_options):
        self.module = module
        self.sub_group_size = sub_group_size
        super().__init__(*args, **core_options)
        self.parameter_offload = gathering(self.core)
        for param in self._params:
            param._z3_optimizer = _OptimizerLink(self)

    dtype, fp16_groups = forwarded("low_precision_dtype", False), forwarded("bit16_groups", False)

    @property
    def partition_count(self):
        return dist.get_world_size(self.dp_process_group) if self.dp_process_group is not None else 1

    # ---- slices, padded as they lie on disk -------------------------------------------------------------
    def _sub_groups(self, dense=False):
        """Lists of parameter indices: the units of the saved layout. ``dense``: without parameters that have ranks of
        their own."""
        numels = [
            [-1 if dense and ranks_of(param) is not None else param.ds_numel for param in group]
            for group in self.bit16_groups
        ]
        return _C.SavedLayout.sub_grouped(numels, int(self.sub_group_size), self.partition_count).units()

    def _flat_sub_groups(self, tensors, dense=False):
        return [self.core.padded_slices(tensors, run) for run in self._sub_groups(dense)]

    def _sources(self, kind):
        """``_flat_sub_groups`` of dense parameters in files, read when it is written down."""
        kept = self.stepping.kept()[kind]
        sources = [self.core.slice_source(*kept, run) for run in self._sub_groups(dense=True)]
        return [TensorOfPieces(source.bytes // 4, torch.float32, source=source) for source in sources]

    @property
    def fp32_partitioned_groups_flat(self):
        """One flat fp32 tensor (a copy) for each sub-group: this rank's slices of the masters, padding included.
        ``optimizer.optimizer.state[flat]`` has their states, padded alike, and "step"."""
        flats = enumerate(self._flat_sub_groups(self.own_tensors("fp32")))
        return [with_states(flat, self, "_states_of_sub_group", position) for position, flat in flats]

    def _states_of_sub_group(self, position):
        run = self._sub_groups()[position]
        kept = self._states_of_pieces([n for n, (index, _, _) in enumerate(self.core.pieces()) if index in run])
        if self.stepping.fused:  # known on a rank that owns nothing of these parameters, too
            kept = {**dict.fromkeys(self.state_names()), "step": max(int(self.core.steps()[index]) for index in run)}
        whole = {name: self._flat_sub_groups(self.own_tensors(name))[position] for name in kept if name != "step"}
        return {**kept, **whole}

    fp32_groups_flat = fp32_partitioned_groups_flat

    # ---- state -------------------------------------------------------------------------------------------------------
    def state_dict(self):
        """This rank's slices; see ``docs/tutorials/checkpoints.md`` for the keys."""
        return self._saved_state(lambda kind: self._flat_sub_groups(self.own_tensors(kind), dense=True))

    def state_dict_in_pieces(self):
        """The same for writing it down: what rests in files is a ``TensorOfPieces``, read then. Write it, or copy it,
        before the next step."""
        return self._saved_state(self._sources, in_pieces=True) if self.rests_in_files() else self.state_dict()

    def _saved_state(self, flats, in_pieces=False):
        inner, steps = {}, self._steps()
        kept = InnerStates(self)
        states = {name: flats(name) for name in sorted({kind for kinds in kept.kinds for kind in kinds})}
        groups_of = groups_of_params(self.bit16_groups)
        runs = self._sub_groups(dense=True)
        groups_of_runs = [groups_of[run[0]] for run in runs]
        for position, (group, run) in enumerate(zip(groups_of_runs, runs)):
            inner[position] = kept.of_group(group, run, [steps[index] for index in run])
            inner[position].update({kind: states[kind][position] for kind in kept.kinds[group]})
        groups = [
            {**args, "params": [index for index, own in enumerate(groups_of_runs) if own == number]}
            for number, args in enumerate(self._group_args())
        ]
        own = OwnedStates(self.stepping, self.bit16_groups).by_name(in_pieces=in_pieces)
        return {
            "zero_stage": ZeroStageEnum(self.stage),
            **self._common_state(),
            "partition_count": self.partition_count,
            "optimizer_state_dict": {"state": inner, "param_groups": groups},
            "fp32_flat_groups": flats("fp32"),
            **({} if own is None else {OWN_PARAMS: own}),
        }

    # ---- universal checkpoints ---------------------------------------------------------------------------------------
    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir):
        """Masters, states, steps and hyperparameters of this rank from the folder of a universal checkpoint."""
        self.load_hp_checkpoint_state_from_checkpoint_dir("bit16_groups", checkpoint_dir)

    def load_module_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir, load_from_fp32_weights):
        """The model's weights and buffers from there; masters, too, or else they take the weights as the model's dtype
        holds them."""
        self._restore_universal(checkpoint_dir, weights=load_from_fp32_weights, states=False)

    def load_hp_checkpoint_state(self, folder, key, param=None):
        """This rank's slice of ``<folder>/<key>.pt``, flat, padded as all slices are. ``folder`` is that of one
        parameter, ``param``, whose slice it is; without it, of the data-parallel group's."""
        path = os.path.join(folder, f"{key}.pt")
        saved = torch_archive.load(path)
        flat = (saved["param"] if isinstance(saved, dict) else saved).reshape(-1)
        if param is not None and param.ds_numel != flat.numel():
            raise ValueError(f"{path} has {flat.numel()} elements, the parameter has {param.ds_numel}")
        size = -(-flat.numel() // self.partition_count)
        own = flat[self.rank_in_partitions * size : (self.rank_in_partitions + 1) * size]
        return torch.cat([own, own.new_zeros(size - own.numel())])

    def checkpoint_event_epilogue(self):
        """After it: parameters that stay gathered take what the slices hold now."""
        with writing(self.core):
            pass

    def quantize_nontrainable_params(self):
        """Parameters that do not need gradients rest, and are gathered, as codes of 8 bits from now on (MixZ++). Every
        rank calls it. The decoded values are their values. A frozen parameter that the optimizer has takes these values,
        and rests in its own dtype."""
        self.core.code_frozen()

    def invalidate_secondary_tensor(self):
        """The next forward makes the second copy of the parameters anew (hpZ). Every rank calls it."""
        self.core.gatherer.invalidate_copies()

    def destroy(self):
        self.parameter_offload.destroy()
        for param in self._params:
            param.__dict__.pop("_z3_optimizer", None)
        super().destroy()


class _OptimizerLink(EngineLink):
    """Stands for the optimizer on a parameter."""

    def __getattr__(self, name):
        return getattr(self.target, name)
