"""The training engine: a module that knows how to train itself on many ranks.

Python decides what happens; everything per tensor and per bucket happens in the native core (csrc/zero).
"""

import contextlib
import os
from typing import Callable, Dict, Iterable, Union

import torch
from torch.optim.lr_scheduler import _LRScheduler

from deepspeed import comm as dist
from deepspeed._compat import named_parameters
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.convert.export import save_16bit_model, whole_state_dict
from deepspeed.checkpoint.engines.base import make_engine
from deepspeed.checkpoint.layouts.names import expert_optim_states_path
from deepspeed.checkpoint.read.load import load_checkpoint, restore_universal
from deepspeed.checkpoint.write.engine_states import param_shapes
from deepspeed.checkpoint.write.save import expected_bytes, save_checkpoint
from deepspeed.comm import comms_log
from deepspeed.comm.mesh_views import EngineRanks
from deepspeed.config import DeepSpeedConfig, non_default_values
from deepspeed.config.sections import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.engine import cross_engine_scaling
from deepspeed.engine.accessors import ConfigAccessors
from deepspeed.engine.arguments import find_device_index, find_local_rank
from deepspeed.engine.assembly import Assembly
from deepspeed.engine.attributes import Attributes
from deepspeed.engine.build_scheduler import build_scheduler
from deepspeed.engine.compiling import Compiling
from deepspeed.engine.data import TrainingData
from deepspeed.engine.finalizers import unlink_when_dropped
from deepspeed.engine.progress import Progress
from deepspeed.engine.reductions import Reductions
from deepspeed.engine.scheduling import next_move
from deepspeed.host.blas import blas_warning
from deepspeed.log import log_dist, logger, set_log_level_from_string, warning_once
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.zero.audit import Audit
from deepspeed.zero.gathered import GatheredParameters
from deepspeed.zero.model import detach
from deepspeed.zero.nested import cast_floats, tensors_within
from deepspeed.zero.sharded_parameter import is_sharded

DeepSpeedOptimizerCallable = Callable[[Union[Iterable[torch.nn.Parameter], Dict[str, Iterable]]], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], _LRScheduler]
_BACKWARD_STATES = {OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.lp_grads}


class DeepSpeedEngine(Assembly, Attributes, ConfigAccessors, TrainingData, Reductions, Compiling, torch.nn.Module):
    """Wraps ``model``; see ``deepspeed.initialize`` for the arguments."""

    def __init__(
        self,
        args,
        model,
        optimizer=None,
        model_parameters=None,
        training_data=None,
        lr_scheduler=None,
        mpu=None,
        dist_init_required=None,
        collate_fn=None,
        config=None,
        config_class=None,
        mesh_device=None,
        dont_change_device=False,
    ):
        super().__init__()
        if dist_init_required and not dist.is_initialized():
            dist.init_distributed(dist_backend=get_accelerator().communication_backend_name())
        self.client_optimizer = optimizer
        self.client_lr_scheduler = lr_scheduler
        self.training_data = training_data
        self.collate_fn = collate_fn
        self.mpu = mpu
        self.mesh_device = mesh_device
        self._config = (
            config_class if config_class is not None else DeepSpeedConfig(config, mpu, mesh_device=mesh_device)
        )
        self.config = self._config._param_dict
        self.parallel = EngineRanks(mpu)
        self.world_size, self.global_rank = self.parallel.world_size, self.parallel.rank
        self.dp_world_size, self.mp_world_size = self.parallel.dp_world_size, self.parallel.mp_world_size
        self.data_parallel_group = self.parallel.dp_group
        self.seq_parallel_group = None
        self.local_rank = find_local_rank(args)
        index = find_device_index(args, self.local_rank)
        self.device = torch.device(get_accelerator().device_name(index))
        get_accelerator().set_device(index)
        if self.log_level() is not None:
            set_log_level_from_string(self.log_level())

        self._start_counting(model)
        self._gradient_average = self._config.gradient_allreduce_op != "sum"
        self.sparse_tensor_module_names = set()
        self.loaded_engine_state = {}
        self.loaded_checkpoint_dp_world_size = None
        self.checkpoint_engine = make_engine(self._config)
        self._is_gradient_accumulation_boundary = None
        self._seen_backward = False
        self._in_no_sync = False
        self._user_scaled = False
        self._sees_backward = None
        self._micro_batches = 0  # that forward has trained on since the last step
        self.core = None
        self.stepping = None
        self._whole = None
        self.optimizer = self.basic_optimizer = None
        self.module = model

        self._place_model(dont_change_device)
        self._make_optimizer(model_parameters)
        self._audit = self._start_audit()
        self.lr_scheduler = build_scheduler(self._config, self.basic_optimizer, lr_scheduler)
        self.training_dataloader = self.deepspeed_io(training_data) if training_data is not None else None
        self.monitor = MonitorMaster(self._config.monitor_config)
        self.progress = Progress(self)
        unlink_when_dropped(self)
        cross_engine_scaling.enter(self)
        self.tput_timer = self.progress.throughput
        if self.stepping is not None and self.zero_optimization():
            self.stepping.need_all = not self._config.zero_config.ignore_unused_parameters
        if hasattr(self.checkpoint_engine, "expect"):
            self.checkpoint_engine.expect(expected_bytes(self), pinned=self.device.type == "cuda")
        self._report_config()

    def _report_config(self):
        changed = non_default_values(self._config)
        log_dist(
            f"Configuration, as far as it differs from the defaults:\n{changed}"
            if changed
            else "Configuration: all defaults",
            ranks=[0],
        )
        if self.dump_state():
            self._config.print("DeepSpeedConfig")
        slow_blas = blas_warning() if self.device.type == "cpu" and self.global_rank == 0 else None
        if slow_blas:
            warning_once(slow_blas)

    # ---- the three calls of training ---------------------------------------------------------------------------------
    def forward(self, *inputs, **kwargs):
        """Runs the wrapped module. A plain ``backward()`` on what it returns trains, too."""
        if self.fp16_enabled() and self.fp16_auto_cast():
            inputs, kwargs = cast_floats(inputs, torch.float16), cast_floats(kwargs, torch.float16)
        self._need_states({OffloadStateTypeEnum.lp_params}, "engine.forward()")
        trains = self._trains and torch.is_grad_enabled()
        inputs, kwargs = cross_engine_scaling.with_gates(self.core, inputs, kwargs) if trains else (inputs, kwargs)
        self.progress.start_forward()
        try:
            outputs = self.module(*inputs, **kwargs)
        except BaseException:
            if self.core is not None and self.core.gatherer is not None:
                self.core.gatherer.abandon_forward()
            raise
        if trains:
            found = [t for t in tensors_within(outputs) if t.requires_grad]
            self._sees_backward = bool(found or self._sees_backward)
            self._micro_batches += bool(found)
            self.core.forwarded(found, *self._user_plan())
        self.progress.end_forward()
        return outputs

    @property
    def _trains(self):
        return self.core is not None and self.stepping is not None

    def _user_plan(self):
        """Whether a backward that the user runs next is reduced, and the factor its gradients take."""
        scale = 1.0 if self._user_scaled else self.stepping.loss_scale
        return self._reduces_now(), scale / self.gradient_accumulation_steps()

    def _reduces_now(self):
        """Whether the next backward adds up over the ranks: at a boundary, or always where gradients are sharded."""
        if self._in_no_sync:
            return False
        if self._stage_policy.reduces_each_micro_step:
            return True
        if not self.managed_gradient_accumulation():
            return False
        return self.enable_backward_allreduce and self.is_gradient_accumulation_boundary()

    def backward(self, loss, retain_graph=False, scale_wrt_gas=True):
        """Accumulates the gradients of ``loss``, a scalar, and reduces them at the accumulation boundary.

        Divides by the accumulation steps unless ``scale_wrt_gas`` is false, and applies the loss scale. Returns the
        loss divided by the accumulation steps.
        """
        if not torch.is_tensor(loss):
            raise TypeError(
                f"engine.backward needs a tensor, got {type(loss).__name__}; pass the loss itself, not loss.item()"
            )
        assert loss.numel() == 1, (
            f"engine.backward needs a scalar loss, got shape {tuple(loss.shape)}; reduce it first, for example with "
            "loss.mean()"
        )
        assert self.optimizer is not None, (
            "engine.backward needs an optimizer: add an 'optimizer' section to the config or pass optimizer= to "
            "deepspeed.initialize"
        )
        self._need_states(_BACKWARD_STATES, "engine.backward()")
        scale, parts = self.stepping.loss_scale, self.gradient_accumulation_steps() if scale_wrt_gas else 1
        if parts > 1:
            loss = loss / parts
        self.progress.start_backward()
        root = loss.float() * scale if scale != 1.0 else loss
        self.core.begin_backward(self._reduces_now(), root)  # ends by itself with the backward of `root`
        try:
            with cross_engine_scaling.scaled_root(self, scale / parts):
                root.backward(retain_graph=retain_graph)
        except BaseException:
            if self.core.abort_backward():
                logger.warning("backward failed; the gradients of earlier micro steps of this step are lost with it")
            raise
        self._seen_backward = True
        mean = loss.detach().mean()
        self.losses = mean if self.losses is None else self.losses + mean
        self.progress.end_backward(loss)
        return loss

    def scale(self, loss):
        """``loss`` times the loss scale, for a backward that the user runs. Accumulation is divided by the engine."""
        assert self.optimizer is not None, "engine.scale needs an optimizer"
        self._user_scaled = True
        self._replan()
        cross_engine_scaling.tell_others(self, self.stepping.loss_scale)
        return loss * self.stepping.loss_scale

    def step(self, lr_kwargs=None):
        """At an accumulation boundary: clip, update, zero the gradients, step the schedule. Otherwise only counts."""
        assert not self._in_no_sync, (
            "It is illegal to call Engine.step() inside no_sync context manager: gradients are not reduced there; call "
            "it after the context"
        )
        assert self.optimizer is not None, (
            "engine.step needs an optimizer: add an 'optimizer' section to the config or pass optimizer= to "
            "deepspeed.initialize"
        )
        self._need_states(OffloadStateTypeEnum, "engine.step()")
        self._refuse_unseen_backward()
        boundary = self.is_gradient_accumulation_boundary() or not self.managed_gradient_accumulation()
        self._join_backward(boundary)
        self.progress.start_step()
        self._step_applied = False
        try:
            if boundary:
                self._take_step(lr_kwargs)
                self._micro_batches = 0
        except BaseException:
            self.progress.abandon_step()
            raise
        self.micro_steps += 1
        self._seen_backward = False
        self._sees_backward = None
        self._user_scaled = False
        self.progress.end_step(boundary)
        comms_log.collect()
        if boundary and (behind := getattr(self.checkpoint_engine, "behind", None)) is not None:
            behind.step_done()  # raises what went wrong with a save in the background

    def _refuse_unseen_backward(self):
        """A backward that the user ran is noticed at the outputs of forward. Where those hold no tensor that can be
        found, gradients come in without the factor that belongs to them."""
        factor = self._user_plan()[1]
        if self._sees_backward is False and not self._seen_backward and factor != 1.0 and self.core.has_grads():
            raise RuntimeError(
                "the model returned an object in which no tensor that needs gradients was found, so a plain "
                f"loss.backward() could not be noticed, and its gradients lack the factor {factor:g} (loss scale over "
                "accumulation steps). Call engine.backward(loss) instead, or return tensors, tuples, lists, dicts or "
                "objects that hold them as attributes"
            )

    def _join_backward(self, boundary):
        """A rank without a backward in this micro-step still takes part in the reduction of the others' gradients."""
        if self._seen_backward:
            return
        has_gradient = self.core.has_grads()
        self.core.join_backward(boundary or self._stage_policy.reduces_each_micro_step)
        if not has_gradient:
            warning_once(
                "engine.step() without a gradient: there was no backward on this rank since the last step. The step "
                "counts, and changes the weights only by the gradients of other ranks. Was engine.backward(loss) "
                "forgotten? This is said once.",
                key="a step without a gradient",
            )

    def _start_audit(self):
        steps = self._config.zero_config.audit_steps
        if not steps or not self._trains:
            return None
        self._audited_group_of = [index for index, group in enumerate(self.trained_groups) for _ in group]
        return Audit(self, steps)

    def _take_step(self, lr_kwargs):
        move = next_move(self, lr_kwargs)
        if self._audit is not None:
            self.core.finish_backward()
            self._audit.before_step()
        self._step_applied = self.stepping.step(move)
        if self._audit is not None:
            self._audit.after_step(self._step_applied)
            self._audit = None if self._audit.over else self._audit
        self._global_grad_norm = self.stepping.norm
        for param in self._unmanaged:
            param.grad = None
        self.losses = None
        self.gas_boundary_ctr += 1
        self.skipped_steps += 0 if self._step_applied else 1
        self.global_steps += 1  # skipped or not: the samples were seen, and loops over global_steps end
        self.global_samples += self._samples_of_step()

    # ---- accumulation ------------------------------------------------------------------------------------------------
    def is_gradient_accumulation_boundary(self):
        """True on the last micro step before the weights change."""
        if self._is_gradient_accumulation_boundary is not None:
            return self._is_gradient_accumulation_boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary):
        """Decides by hand whether the next backward and step are at a boundary, until it is called again."""
        if not self.managed_gradient_accumulation():
            raise RuntimeError(
                "set_gradient_accumulation_boundary has no meaning with managed_gradient_accumulation false: every "
                "step() is a boundary"
            )
        self._is_gradient_accumulation_boundary = is_boundary
        self._replan()

    @contextlib.contextmanager
    def no_sync(self):
        """Inside, backward only accumulates on this rank; the first backward outside, or step(), reduces all of it.

        At ZeRO stages 2 and 3 this rank then holds whole gradients, one element of the accumulation dtype for each
        parameter element, from the first backward inside until they are reduced.
        """
        assert not self._in_no_sync, "no_sync() is entered twice; leave the first context before"
        self._in_no_sync = True
        self._replan()
        try:
            yield
        finally:
            self._in_no_sync = False
            self._replan()

    @contextlib.contextmanager
    def coalesce_grad_reduction(self):
        """Several backwards inside are reduced once, when the context ends. step() comes after it.

        Costs what ``no_sync`` costs while the context is open.
        """
        with self.no_sync():
            yield
        reduces = self._stage_policy.reduces_each_micro_step or self.is_gradient_accumulation_boundary()
        if self.core is not None and reduces:
            self.core.finish_backward()

    def _replan(self):
        if self._trains:
            self.core.plan_user_backward(*self._user_plan())

    def zero_grad(self, set_to_none=True):
        """Forgets all gradients accumulated so far."""
        if self._audit is not None:
            self._audit.forget()
        if self.core is not None:
            self.core.clear_grads()
        for param in self.module.parameters():
            param.grad = None

    def allreduce_gradients(self, bucket_size=None):
        """Reduces now what backward has accumulated; engine.step() does so by itself."""
        if self.core is not None:
            self.core.finish_backward()

    # ---- modes and attributes ----------------------------------------------------------------------------------------
    def train(self, mode=True):
        self.module.train(mode)
        self.training = mode
        return self

    def eval(self):
        return self.train(False)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "module" in modules and name != "module":
                return getattr(modules["module"], name)
            raise

    def empty_partition_cache(self):
        """Releases gathered parameters; below stage 3 there are none."""
        if self._stage_policy.shards_params and self.core is not None:
            self.parameter_offload.empty_partition_cache()

    # ---- states that wait on the host ------------------------------------------------------------------------------
    def offload_states(self, include=None, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=False):
        """Moves what training keeps on the accelerator to host memory, for as long as this process does something else.

        include: set of ``OffloadStateTypeEnum`` (optim_states, hp_params, lp_params, lp_grads,
        contiguous_grad_buffer); None: all. device: the CPU. pin_memory: host memory from which copies are fast.
        non_blocking: copies are queued together and awaited once. Until ``reload_states`` what needs a state that is
        away raises RuntimeError. On a CPU accelerator all of it is in host memory already and nothing moves.

        Needs ZeRO with an optimizer.
        """
        assert self.zero_optimization() and hasattr(self.optimizer, "offload_states"), (
            "engine.offload_states needs ZeRO (zero_optimization.stage 1, 2 or 3) and an optimizer"
        )
        self.optimizer.offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking=False):
        """Everything that ``offload_states`` has moved comes back to where it was."""
        assert self.zero_optimization() and hasattr(self.optimizer, "reload_states"), (
            "engine.reload_states needs ZeRO (zero_optimization.stage 1, 2 or 3) and an optimizer"
        )
        self.optimizer.reload_states(non_blocking)

    def _need_states(self, kinds, what):
        states = getattr(self.optimizer, "states", None)
        if states is not None and states.away:
            states.need(kinds, what)

    # ---- saving and loading ------------------------------------------------------------------------------------------
    def module_state_dict(self, destination=None, prefix="", keep_vars=False, exclude_frozen_parameters=False):
        """The module's state dict, without parameters that are not trained when asked so."""
        state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, param in named_parameters(self.module):
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self,
        checkpoint,
        strict=True,
        custom_load_fn=None,
        fetch_z3_params=False,
        z3_params_to_fetch=None,
        allowed_missing_keys=None,
    ):
        """Loads ``checkpoint["module"]`` into the module, with ``custom_load_fn(src=, dst=)`` when given.

        ``allowed_missing_keys`` may be missing although ``strict``. ``fetch_z3_params``: parameters of stage 3,
        those of ``z3_params_to_fetch`` or all, are whole meanwhile and take rank 0's values; every rank calls it then.
        """
        state = checkpoint["module"]
        params = self.module.parameters() if z3_params_to_fetch is None else z3_params_to_fetch
        fetched = [param for param in params if is_sharded(param)] if fetch_z3_params else []
        with GatheredParameters(fetched, modifier_rank=0 if fetched else None):
            if custom_load_fn is not None:
                custom_load_fn(src=state, dst=self.module)
            elif allowed_missing_keys:
                missing, unexpected = self.module.load_state_dict(state, strict=False)
                missing = [key for key in missing if key not in set(allowed_missing_keys)]
                if strict and (missing or unexpected):
                    raise RuntimeError(
                        f"the checkpoint does not fit the model: missing {missing}, unexpected {unexpected}. Build the "
                        "model as it was saved, or pass strict=False"
                    )
            else:
                self.module.load_state_dict(state, strict=strict)
        if self.core is not None:
            self.core.refresh_master()

    def save_checkpoint(self, save_dir, tag=None, client_state={}, save_latest=True, exclude_frozen_parameters=False):  # noqa: B006
        """Writes ``save_dir/tag``; every rank must call it. Returns True. See ``deepspeed.checkpoint.write.save``."""
        self._need_states(OffloadStateTypeEnum, "engine.save_checkpoint()")
        return save_checkpoint(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)

    def load_checkpoint(
        self,
        load_dir,
        tag=None,
        load_module_strict=True,
        load_optimizer_states=True,
        load_lr_scheduler_states=True,
        load_module_only=False,
        custom_load_fn=None,
    ):
        """Returns ``(path, client_state)``, or ``(None, None)`` when there is nothing to load."""
        self._need_states(OffloadStateTypeEnum, "engine.load_checkpoint()")
        return load_checkpoint(
            self,
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
        )

    def restore_universal(self, folder, params=None, weights=True, states=True):
        """Optimizer states and weights alone; see ``deepspeed.checkpoint.read.load.restore_universal``."""
        self._need_states(OffloadStateTypeEnum, "restoring a universal checkpoint")
        restore_universal(self, folder, params, weights, states)

    def save_16bit_model(self, save_dir, save_filename="pytorch_model.bin", exclude_frozen_parameters=False):
        """Writes the module's weights, in the dtype it computes with, to one file. Returns True."""
        self._need_states({OffloadStateTypeEnum.lp_params}, "engine.save_16bit_model()")
        return save_16bit_model(self, save_dir, save_filename, exclude_frozen_parameters)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters=False):
        """Rank 0: the whole state dict on the CPU, in the dtype the model computes with; None elsewhere.

        Every rank calls it. Raises ValueError below ZeRO stage 3.
        """
        if not self._stage_policy.shards_params:
            raise ValueError("consolidating weights needs ZeRO stage 3; below it module.state_dict() is whole")
        return whole_state_dict(self, exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters=False):
        """The same; raises ValueError where nothing is partitioned."""
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _get_optimizer_ckpt_name(self, checkpoints_path, tag, expp_rank):
        """Path of the optimizer states of the experts of one expert-parallel rank, where ZeRO is off."""
        return expert_optim_states_path(os.path.join(checkpoints_path, str(tag)), expp_rank, self.mp_rank_for_files())

    def _get_zero_param_shapes(self):
        """One ordered dict name -> shape for each parameter group; None below ZeRO stage 1."""
        return param_shapes(self) if self.zero_optimization() else None

    def save_fp16_model(self, save_dir, save_filename="pytorch_model.bin"):
        """Old name of ``save_16bit_model``."""
        return self.save_16bit_model(save_dir, save_filename)

    def destroy(self):
        """Takes the engine off the model: hooks go, parameters get memory of their own again.

        Waits for a checkpoint on its way to the disk, and raises what went wrong with it when all else is done.
        """
        try:
            if hasattr(self.checkpoint_engine, "cleanup"):
                self.checkpoint_engine.cleanup()
        finally:
            self._release()

    def _release(self):
        if self.core is not None:
            if hasattr(self.basic_optimizer, "fused_state"):
                self.basic_optimizer.fused_state = None
            if self._whole is not None:
                self._whole.unlink()
            if self.zero_optimization():
                if self._stage_policy.shards_params:
                    detach(self.module, self._shard_group, self.parallel.dp_group)
                self.optimizer.destroy()
            self.core.release()
            self.core = None
        log_dist("engine destroyed", ranks=[0], level=10)
