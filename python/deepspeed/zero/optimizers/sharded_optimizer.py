"""Optimizer states on shards: the optimizer that ``deepspeed.initialize`` returns for ZeRO stages 1 and 2.

Each rank updates its own pieces of the fp32 masters; the whole model is gathered after the step. Any element-wise
optimizer may be inside. Source of the method: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models" (SC 2020), section 5.
"""

import itertools
import os
import weakref

import torch

from deepspeed import _native
from deepspeed import comm as dist
from deepspeed.comm.agreement import attempt
from deepspeed.comm.mesh_views import adopted
from deepspeed.config.sections import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.log import logger
from deepspeed.optim.loss_scaler import CreateLossScaler
from deepspeed.utils.forwarding import answers_from
from deepspeed.utils.param_access import shape_of
from deepspeed.zero.errors import ZeRORuntimeException
from deepspeed.zero.offload.offload_states import OffloadedStates
from deepspeed.zero.optimizers.base_optimizer import DTYPES, ZeROOptimizer
from deepspeed.zero.optimizers.flat_states import with_states
from deepspeed.zero.parameters.param_ranks import ranks_of
from deepspeed.zero.states.named_states import groups_of_params
from deepspeed.zero.states.param_states import ParamStates
from deepspeed.zero.states.states_in_files import StatesInFiles


# The epilogues reduce the gradients that backward has left on this rank. ``rests_in_files`` says whether masters or
# optimizer states rest in files.
@answers_from(
    {
        "overlapping_partition_gradients_reduce_epilogue": "core.finish_backward()",
        "independent_gradient_partition_epilogue": "core.finish_backward()",
        "rests_in_files": "core.rest_in_files()",
    }
)
class ShardedOptimizer(ParamStates, ZeROOptimizer):
    """The common part of the sharded stages: one core, pieces, access to whole tensors.

    ``engine`` owns the core; without one the optimizer makes its own for one process, from ``core_options`` (see
    ``zero.core.build_core``). ``param_names``: parameter -> name. ``scaler_args``: static loss scale, whether it is
    dynamic, and arguments of the dynamic one. ``clip_grad``: the largest 2-norm of all gradients, 0 for any.
    """

    saved_form = own_slices = stage = None
    partition_gradients = True
    _engine = None

    @property
    def engine(self):
        return self._engine() if self._engine is not None else None

    def __init__(
        self, init_optimizer, engine, param_names, scaler_args, clip_grad, dp_process_group=None, **core_options
    ):
        self.optimizer = init_optimizer
        self._engine = weakref.ref(engine) if engine is not None else None
        self.bit16_groups = [list(group["params"]) for group in init_optimizer.param_groups]
        self._params = [param for group in self.bit16_groups for param in group]
        narrow = [param.dtype for param in self._params if param.dtype in DTYPES]
        self.low_precision_dtype = narrow[0] if narrow else torch.float32
        self.param_names = dict(param_names or {})
        self.dp_process_group = dp_process_group
        scaler = CreateLossScaler(self.low_precision_dtype, *scaler_args)
        mesh = adopted(dp_process_group) if engine is None else None
        self._start(engine, scaler, clip_grad, mesh=mesh, **core_options)
        if not self.stepping.fused and self.rests_in_files():
            raise ZeRORuntimeException(
                f"{type(init_optimizer).__name__} cannot update masters that rest in files: use an optimizer of "
                "deepspeed.ops, or give zero_optimization.placement more memory"
            )
        if engine is not None and engine.zero_nvme_offload_optimizer() and not self.stepping.fused:
            self.stepping.in_files = self._states_in_files(engine)
        self._link(self._params)
        for name, param in zip(self.stepping.names, self._params):
            self.param_names.setdefault(param, name)
        self.states = OffloadedStates(self)

    def _states_in_files(self, engine):
        zero, rank = engine._config.zero_config, dist.get_rank() if dist.is_initialized() else 0
        base, below = str(zero.offload_optimizer.nvme_path), f"zero_stage_{int(self.stage)}/optimizer/rank{rank}"
        folder = _native._C.SwapFolder("zero_optimization.offload_optimizer.nvme_path", base, below)
        most = zero.sub_group_size if self.core.policy.shards_params else zero.reduce_bucket_size
        return StatesInFiles(self.optimizer, self.stepping.masters, folder, most)

    # ---- states that wait on the host ------------------------------------------------------------------------------
    def offload_states(self, include=None, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=False):
        """Moves states to host memory; see ``zero.offload_states``. A CPU accelerator has them there already."""
        self.states.offload(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking=False):
        """Everything that ``offload_states`` has moved comes back."""
        self.states.reload(non_blocking)

    def step(self, closure=None):
        self.states.need(OffloadStateTypeEnum, "optimizer.step()")
        return super().step(closure)

    # ---- sizes -----------------------------------------------------------------------------------------------------
    @property
    def partition_count(self):
        """Number of shards, one entry for each parameter group."""
        return [_rank_and_size(self.dp_process_group)[1]] * len(self.bit16_groups)

    @property
    def rank_in_partitions(self):
        return _rank_and_size(self.dp_process_group)[0]

    @property
    def single_partition_of_fp32_groups(self):
        """One flat fp32 tensor (a copy) for each parameter group: the masters that this rank owns, without padding.
        ``optimizer.optimizer.state[flat]`` has their states, and "step"."""
        begins = [0, *itertools.accumulate(map(len, self.fp32_groups))]
        numbers = [range(begin, end) for begin, end in zip(begins, begins[1:])]
        return [
            with_states(_end_to_end(self.stepping.own("fp32", own)), self, "_states_of_pieces", own) for own in numbers
        ]

    def _states_of_pieces(self, numbers):
        """The states of pieces, each end to end, and the number of updates that the most updated one has seen."""
        masters = [self.stepping.masters[number] for number in numbers]
        kept = [self.optimizer.state.get(master, {}) for master in masters]
        if not any(kept):
            return {}
        found = {"step": max(int(state.get("step", 0)) for state in kept)}
        for name in self.state_names():
            if any(name in state for state in kept):
                values = zip(masters, self.stepping.own(name, numbers))
                found[name] = _end_to_end([torch.zeros_like(m) if value is None else value for m, value in values])
        return found

    @property
    def averaged_gradients(self):
        """dict: group -> list of this rank's pieces of the reduced gradients (views; copies of what lies in files)."""
        groups, used = groups_of_params(self.bit16_groups), self.core.used()
        own = zip(self.core.pieces(), self.core.grads(copies=True))
        named = [(groups[param], grad) for (param, _, _), grad in own if used[param]]
        return {number: [grad for group, grad in named if group == number] for number in range(len(self.bit16_groups))}

    def check_overflow(self, partition_gradients=True):
        """Whether the reduced gradients hold an inf or nan on any rank. Every rank calls it."""
        self.stepping.overflow = bool(self._most([float(self.has_overflow_partitioned_grads_serial())]).item())
        return self.stepping.overflow

    def _most(self, values):
        """A tensor: of each of the ``values`` the largest that a rank has."""
        values = torch.tensor(values, device=self.core_device)
        if self.dp_process_group is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.dp_process_group)
        return values

    has_overflow = check_overflow

    def has_overflow_partitioned_grads_serial(self):
        """Whether this rank's share of the reduced gradients holds an inf or nan. No communication."""
        return any(not bool(grad.isfinite().all()) for grads in self.averaged_gradients.values() for grad in grads)

    def sequential_execution(self, function, message, group=None):
        """Runs ``function()`` on one rank of ``group`` (None: the data-parallel one) after the other, in rank order.
        Raises what it raised here, after all had their turn."""
        group, error = self.dp_process_group if group is None else group, None
        mine, count = _rank_and_size(group)
        if mine == 0:
            logger.info(message)
        for turn in range(count):
            if turn == mine:
                _, error = attempt(function)
            if group is not None:
                dist.barrier(group=group)
        if error is not None:
            raise error

    def free_grad_in_param_list(self, param_list):
        """Gradients that lie in ``param.grad`` go; what the engine has accumulated stays."""
        for param in param_list:
            param.grad = None

    @property
    def core_device(self):
        return self._params[0].device if self._params else torch.device("cpu")

    # ---- state -----------------------------------------------------------------------------------------------------
    def _steps(self):
        """Updates that each parameter has seen, on every rank alike."""
        if self.stepping.fused:
            return [int(step) for step in self.core.steps()]
        steps = [0.0] * len(self._params)
        for master, (index, _, _) in zip(self.stepping.masters, self.core.pieces()):
            steps[index] = float(self.optimizer.state.get(master, {}).get("step", 0))
        return [int(step) for step in self._most(steps)]

    def _group_args(self):
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]

    def _common_state(self):
        return {
            "loss_scaler": self.loss_scaler,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
        }

    def _shapes(self):
        """One dict name -> shape for each parameter group, of those that all ranks train."""
        named = [zip(*pair) for pair in zip(self.stepping.names_of(self.bit16_groups), self.bit16_groups)]
        return [{name: shape_of(p) for name, p in group if ranks_of(p) is None} for group in named]

    def load_state_dict(
        self,
        state_dict_list,
        load_optimizer_states=True,
        load_from_fp32_weights=False,
        checkpoint_folder=None,
        load_serial=None,
        param_shapes=None,
    ):
        """``state_dict_list`` holds what all ranks have saved, in rank order; any number of ranks may have saved. With
        ``own_slices`` (stage 3) a rank may also pass nothing but its own, of as many ranks.

        Without ``load_from_fp32_weights`` the masters are taken from the model's own weights. Raises ValueError where
        groups or sizes do not fit. ``load_serial``: a tensor that this rank has received from the one before it on its
        machine (``zero_optimization.pipeline_loading_checkpoint``); it goes on to the next one when everything is read.
        """
        saved = list(state_dict_list) if isinstance(state_dict_list, (list, tuple)) else [state_dict_list]
        alone = self.own_slices is not None and len(saved) == 1
        if alone and 1 < self.partition_count == saved[0].get("partition_count"):
            saved = self.own_slices(saved[0], self.rank_in_partitions, self.partition_count)
        self._restore(
            self.saved_form(saved, param_shapes or self._shapes()),
            load_optimizer_states,
            load_from_fp32_weights,
            when_read=None if load_serial is None else lambda: _hand_on(load_serial),
        )

    def destroy(self):
        self.states.reload()
        for param in self._params:
            for name in ("_ds_link", "_hp_mapping", "_dp_group", "load_hp_checkpoint_state"):
                param.__dict__.pop(name, None)
        super().destroy()


def _rank_and_size(group):
    """``(rank, ranks)`` of this process in a group; None: it is alone."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def _end_to_end(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) if tensors else torch.zeros(0)


def _hand_on(serial):
    """The next rank of this machine may load."""
    serial += 1
    local_size = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())
    if dist.get_local_rank() != local_size - 1 and dist.get_rank() + 1 < dist.get_world_size():
        dist.send(serial, dist.get_rank() + 1)
