"""Saves and loads of an engine, and states that it moves to the host for a while."""

import functools
import os

from deepspeed._compat import named_parameters
from deepspeed.checkpoint.constants import (
    CHECKPOINT_PP_DEGREE,
    CHECKPOINT_TP_DEGREE,
)
from deepspeed.checkpoint.convert.whole_model import save_16bit_model, whole_state_dict
from deepspeed.checkpoint.engines.built_in import TorchCheckpointEngine
from deepspeed.checkpoint.layouts.names import EXPERT_OPTIM_STATES
from deepspeed.checkpoint.read import expert_states, weights
from deepspeed.checkpoint.read.load import load_checkpoint, restore_universal
from deepspeed.checkpoint.run_state import Counters, LoadTarget, RunRanks, RunState
from deepspeed.checkpoint.save.contents import param_shapes
from deepspeed.checkpoint.save.save import save_checkpoint
from deepspeed.comm import process_group as dist
from deepspeed.comm.mesh_views import PIPELINE, ask_mpu
from deepspeed.config.secrets import shown
from deepspeed.config.sections import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.engine.members import engine_parts, member, run_hooks
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.optim.schedule_values import rehearse
from deepspeed.zero.core import writing
from deepspeed.zero.gathers.gathered import GatheredParameters
from deepspeed.zero.optimizers.base_optimizer import DeepSpeedOptimizer
from deepspeed.zero.optimizers.restore import Restore
from deepspeed.zero.parameters.param_ranks import ModuleTensors
from deepspeed.zero.parameters.sharded_parameter import is_sharded
from deepspeed.zero.states.named_states import OwnedStates


def parallel_metadata(mpu):
    """``{pp_degree, tp_degree}`` of an ``mpu``, under whichever names it has them; 1 each without."""
    names = {CHECKPOINT_PP_DEGREE: PIPELINE, CHECKPOINT_TP_DEGREE: ("tensor_model", "slice", "model")}
    return {degree: ask_mpu(mpu, "world_size", kinds) or 1 for degree, kinds in names.items()}


def optimizer_values(optimizer, stepping, shards_params):
    """Values of an optimizer beside its states; ``SavedState.extra`` gives them back."""
    found = {"overflow": bool(stepping.overflow)}
    if stepping.scaler is not None:
        found["loss_scaler"] = dict(vars(stepping.scaler))
        found["dynamic_loss_scale"] = bool(stepping.scaler.dynamic)
    if isinstance(optimizer, DeepSpeedOptimizer) and not shards_params:
        found["clip_grad"] = optimizer.clip_grad
    return found


def _with_older_name(save):
    """``save`` with ``client_sd``, which tutorials call ``client_state``."""

    @functools.wraps(save)
    def call(self, *args, client_sd=None, **named):
        return save(self, *args, **named, **({} if client_sd is None else {"client_state": client_sd}))

    return call


class EngineTarget(LoadTarget):
    """The module, the core and the schedule of an engine."""

    def __init__(self, engine):
        super().__init__(engine.module)
        self.engine = engine

    def load_module(self, state):
        self.engine.load_module_state_dict({"module": state}, strict=False)

    def load_by(self, custom_load_fn, state):
        self.engine.load_module_state_dict({"module": state}, custom_load_fn=custom_load_fn, fetch_z3_params=True)

    def writing(self):
        return writing(self.engine.core)

    def take_weights(self):
        if self.engine.core is not None:
            self.engine.core.refresh_master()

    def publish(self):
        self.engine.core.publish()

    def restoring(self, saved, options=None):
        trained = [param for group in self.engine.trained_groups for param in group]
        return Restore(self.engine.stepping, trained, saved, options)

    def rehearse(self, schedule):
        scheduler, stepping = self.engine.lr_scheduler, self.engine.stepping
        optimizer = stepping.optimizer if stepping is not None else None
        rehearse(scheduler, optimizer, lambda: scheduler.load_state_dict(schedule))


@engine_parts.add("_checkpoints")
class Checkpoints:
    """A part of the engine. It makes the ``RunState`` that is saved or filled, and applies what a load returns."""

    def __init__(self, engine):
        self.engine = engine
        self.memo = {}  # see ``RunState``

    # ---- the run as a value ------------------------------------------------------------------------------------------
    def run_state(self, client_state=None):
        """The ``RunState`` of this rank as it is now."""
        self.engine._need_alive("saving or loading a state")
        engine, config = self.engine, self.engine._config
        return RunState(
            weights=ModuleTensors(engine.module),
            module_state=engine.module_state_dict,
            ranks=self._ranks(),
            counters=Counters(
                engine.global_steps,
                engine.global_samples,
                engine.skipped_steps,
                engine._window.begin,
                engine._window.trained,
                engine.sparse_tensor_module_names,
                engine._tokens.saved,
                engine._token_dropping.state(),
            ),
            policy=engine._stage_policy,
            config=config,
            ds_config=shown(engine.config),
            given_groups=engine._assembly.made_groups if engine.client_optimizer is None else [],
            resumed={
                "learned_fires": engine.core.learned_fires() if engine.core is not None else [],
                "step_strategy": engine.core.strategy_counters() if engine.core is not None else {},
            },
            **(self._trained() if engine.stepping is not None else {}),
            scheduler=engine.lr_scheduler,
            writer=engine.checkpoint_engine,
            device=engine.device,
            client_state=client_state or {},
            loaded_values=engine.loaded_engine_state,
            memo=self.memo,
            position=self._position,
            tensor_facts=engine._tensors.saved_facts,
            optimizer_facts=engine._experts.folding_facts(),
        )

    def after_step(self):
        """Raises an error of a save in the background."""
        if (behind := getattr(self.engine.checkpoint_engine, "behind", None)) is not None:
            behind.step_done()

    def _trained(self):
        engine, stepping = self.engine, self.engine.stepping
        groups = engine.trained_groups
        return {
            "states": OwnedStates(stepping, groups),
            "group_names": stepping.names_of(groups),
            "trained_groups": groups,
            "options": [
                {key: value for key, value in group.items() if key != "params"}
                for group in stepping.optimizer.param_groups
            ],
            "optimizer_values": optimizer_values(engine.optimizer, stepping, engine._stage_policy.shards_params),
            "optimizer_state": getattr(engine.optimizer, "state_dict_in_pieces", engine.optimizer.state_dict),
        }

    def _ranks(self):
        engine, parallel = self.engine, self.engine.parallel
        alone = parallel.dp_world_size == 1
        return RunRanks(
            rank=engine.global_rank,
            world_size=engine.world_size,
            dp_rank=parallel.dp_rank,
            dp_world_size=parallel.dp_world_size,
            dp_ranks=(engine.global_rank,) if alone else tuple(dist.get_all_ranks_from_group(parallel.dp_group)),
            mp_rank=engine.mp_rank_for_files(),
            mp_world_size=engine.mp_world_size,
            holders=engine._access.access.world if engine._stage_policy.shards_params else 1,
            degrees=self._degrees(),
        )

    def _degrees(self):
        parallel = self.engine.parallel
        own = {} if parallel.mpu is not None else {CHECKPOINT_TP_DEGREE: parallel.mp_world_size}
        return {**parallel_metadata(parallel.mpu), **own}

    def _position(self):
        """In the training data, where the accumulation window began. None for a stage in the middle of a pipeline."""
        engine = self.engine
        loads = getattr(engine, "_loads_data", None)
        if loads is not None and not loads():
            return None
        return engine._data.position(at_window=engine._window.trained > 0)

    def _apply(self, found):
        """Puts a ``LoadedRun`` into the engine, whose weights and states are loaded. Gradients that it has accumulated
        are of other weights: they are forgotten."""
        engine, counters = self.engine, found.counters
        if found.schedule is not None:
            engine.lr_scheduler.load_state_dict(found.schedule)
        engine._accumulation.start_window()
        if counters is not None:
            engine.global_steps, engine.global_samples = counters.global_steps, counters.global_samples
            engine.skipped_steps, engine.micro_steps = counters.skipped_steps, counters.micro_steps
            engine.sparse_tensor_module_names = counters.sparse_names
            engine._tokens.restore(counters.consumed_tokens)
            engine._token_dropping.load(counters.random_ltd)
        engine.loaded_checkpoint_dp_world_size = found.dp_world_size
        if engine.core is not None:
            engine.core.forget_errors()  # of exchanges of codes
        if engine.core is not None and (
            engine.core.strategy_states() or engine._compressed.active
        ):  # without counters zenflow begins anew, as errors of exchanges do in any case
            engine.core.restore_strategy(found.strategy or {})
        if found.data is not None and hasattr(engine.training_dataloader, "load_state_dict"):
            engine.training_dataloader.load_state_dict(found.data)
        if found.learned_fires is not None:
            engine.core.set_learned_fires(found.learned_fires)
        if found.rng is not None:
            weights.restore(found.rng)
        run_hooks(engine, "after_load")
        engine.loaded_engine_state = found.own_values

    # ---- states that wait on the host ------------------------------------------------------------------------------
    @member
    def offload_states(self, include=None, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=False):
        """Moves what training keeps on the accelerator to host memory, for as long as this process does something else.

        include: set of ``OffloadStateTypeEnum`` (optim_states, hp_params, lp_params, lp_grads,
        contiguous_grad_buffer); None: all. device: cpu, or nvme, to files below the nvme_path of the section
        offload_optimizer. pin_memory: host memory from which copies are fast.
        non_blocking: copies are queued together and awaited once. Until ``reload_states`` what needs a state that is
        away raises RuntimeError. On a CPU accelerator all of it is in host memory already and nothing moves there.

        Needs ZeRO with an optimizer.
        """
        self._that_moves("offload_states")(include, device, pin_memory, non_blocking)

    @member
    def reload_states(self, non_blocking=False):
        """Everything that ``offload_states`` has moved comes back to where it was."""
        self._that_moves("reload_states")(non_blocking)

    def _that_moves(self, name):
        assert self.engine.zero_optimization() and hasattr(self.engine.optimizer, name), (
            f"engine.{name} needs ZeRO (zero_optimization.stage 1, 2 or 3) and an optimizer"
        )
        return getattr(self.engine.optimizer, name)

    # ---- the module alone --------------------------------------------------------------------------------------------
    @member
    def module_state_dict(self, destination=None, prefix="", keep_vars=False, exclude_frozen_parameters=False):
        """The module's state dict, without parameters that are not trained when asked so."""
        module = self.engine.module
        state = module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for name, param in named_parameters(module) if exclude_frozen_parameters else ():
            if not param.requires_grad:
                state.pop(prefix + name, None)
        return state

    @member
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
        module, state = self.engine.module, checkpoint["module"]
        params = module.parameters() if z3_params_to_fetch is None else z3_params_to_fetch
        fetched = [param for param in params if is_sharded(param)] if fetch_z3_params else []
        with GatheredParameters(fetched, modifier_rank=0 if fetched else None):
            if custom_load_fn is not None:
                custom_load_fn(src=state, dst=module)
            elif allowed_missing_keys:
                missing, unexpected = module.load_state_dict(state, strict=False)
                missing = [key for key in missing if key not in set(allowed_missing_keys)]
                if strict and (missing or unexpected):
                    raise RuntimeError(
                        f"the checkpoint does not fit the model: missing {missing}, unexpected {unexpected}. Build the "
                        "model as it was saved, or pass strict=False"
                    )
            else:
                module.load_state_dict(state, strict=strict)
        if self.engine.core is not None:
            self.engine.core.refresh_master()

    # ---- all of it ---------------------------------------------------------------------------------------------------
    @member
    @_with_older_name
    def save_checkpoint(self, save_dir, tag=None, client_state={}, save_latest=True, exclude_frozen_parameters=False):  # noqa: B006
        """Writes ``save_dir/tag``; every rank must call it. Returns True. See ``deepspeed.checkpoint.save.save``."""
        self.engine._need_states(OffloadStateTypeEnum, "engine.save_checkpoint()")
        run_hooks(self.engine, "before_save")
        with self.engine._step_log.phases.inside("checkpoint"), self.engine._compressed.common_weights():
            save_checkpoint(self.run_state(client_state), save_dir, tag, save_latest, exclude_frozen_parameters)
        self.engine._memory_copies.belongs_to(save_dir)
        return True

    @member
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
        """Returns ``(path, client_state)``, or ``(None, None)`` when there is nothing to load. Without a tag it is what
        ``latest`` names, or a snapshot of this run in memory (``elasticity.memory_copies``) that is newer."""
        self.engine._need_states(OffloadStateTypeEnum, "engine.load_checkpoint()")
        snapshots = None if load_module_only else self.engine._memory_copies.belongs_to(load_dir)
        with self.engine._step_log.phases.inside("checkpoint"):
            found = load_checkpoint(
                self.run_state(),
                EngineTarget(self.engine),
                load_dir,
                tag,
                load_module_strict,
                load_optimizer_states,
                load_lr_scheduler_states,
                load_module_only,
                custom_load_fn,
                snapshots,
            )
        if found is None:
            return None, None
        self._apply(found)
        return found.path, found.client_state

    @member
    def restore_universal(self, folder, params=None, weights=True, states=True):
        """Optimizer states and weights alone; see ``deepspeed.checkpoint.read.load.restore_universal``."""
        self.engine._need_states(OffloadStateTypeEnum, "restoring a universal checkpoint")
        restore_universal(self.run_state(), EngineTarget(self.engine), folder, params, weights, states)

    @staticmethod
    @member
    def load_moe_state_dict(
        checkpoint_path,
        tag,
        state_dict,
        old_moe_load,
        model=None,
        mpu=None,
        num_experts=1,
        checkpoint_engine=TorchCheckpointEngine(),  # noqa: B008 (the published signature)
        autoep_layers=None,
        folding_spec=None,
        checkpoint_mp_rank=None,
    ):
        """Adds to ``state_dict`` the weights of the experts that this rank has, from ``checkpoint_path/tag``, under the
        names that they have in ``model``, whose layers know their ranks (``deepspeed.initialize``).

        old_moe_load: files are ``expert_E_mp_rank_RR_model_states.pt``; no model is needed, but ``num_experts`` (all,
        or a list of them, whose largest counts). mpu: says which model-parallel rank's files; ``checkpoint_mp_rank``
        goes before it. checkpoint_engine: its ``load`` reads files. autoep_layers: ``ds_autoep_layers`` of the model
        file: the numbers of experts are compared with those of ``model``. folding_spec: a ``ParallelFoldingSpec``,
        whose ``ep_size`` is compared with that of the layers.
        """
        mp_rank = mpu.get_model_parallel_rank() if mpu is not None else 0
        mp_rank = mp_rank if checkpoint_mp_rank is None else checkpoint_mp_rank
        folder = os.path.join(checkpoint_path, tag)
        if model is None and not old_moe_load:
            raise ValueError("load_moe_state_dict: pass model=, whose layers say which experts this rank has")
        if model is None and autoep_layers:
            raise ValueError(
                "load_moe_state_dict: autoep_layers= is compared with the layers of a model, and there is none: pass "
                "model=, or leave autoep_layers= out"
            )
        for about in (autoep_layers.values() if isinstance(autoep_layers, dict) else autoep_layers) or ():
            layer = model.get_submodule(about["module_path"])
            if layer.num_experts != about["num_experts"]:
                raise ValueError(
                    f"layer '{about['module_path']}' was saved with {about['num_experts']} experts, the model's has "
                    f"{layer.num_experts}"
                )
        for name, layer in model.named_modules() if model is not None and folding_spec is not None else ():
            if isinstance(layer, AutoEPMoELayer) and layer.ep_size != folding_spec.ep_size:
                raise ValueError(
                    f"folding_spec has ep_size={folding_spec.ep_size}, and layer '{name}' of the model shares its "
                    f"experts among {layer.ep_size} ranks: pass the spec of the model"
                )
        if model is None:
            state_dict.update(expert_states.of_old_files(folder, num_experts, mp_rank, checkpoint_engine))
        else:
            state_dict.update(expert_states.of_model(folder, ModuleTensors(model), mp_rank, checkpoint_engine))

    # ---- for other programs ------------------------------------------------------------------------------------------
    @member
    def save_16bit_model(self, save_dir, save_filename="pytorch_model.bin", exclude_frozen_parameters=False):
        """Writes the module's weights, in the dtype it computes with, to one file. Returns True."""
        self.engine._need_states({OffloadStateTypeEnum.lp_params}, "engine.save_16bit_model()")
        self._take_writes()
        return save_16bit_model(self.run_state(), save_dir, save_filename, exclude_frozen_parameters)

    @member
    def save_fp16_model(self, save_dir, save_filename="pytorch_model.bin"):
        """Old name of ``save_16bit_model``."""
        return self.engine.save_16bit_model(save_dir, save_filename)

    @member
    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters=False):
        """Rank 0: the whole state dict on the CPU, in the dtype the model computes with; None elsewhere.

        Every rank calls it. Raises ValueError where every rank has the whole weights: below ZeRO stage 3, without
        tensor parallelism.
        """
        if not self.engine._stage_policy.shards_params and self.engine._tensors.ranks == 1:
            raise ValueError("consolidating weights needs ZeRO stage 3; below it module.state_dict() is whole")
        self._take_writes()
        return whole_state_dict(self.run_state(), exclude_frozen_parameters)

    def _take_writes(self):
        """Slices take what was written into whole parameters."""
        if self.engine._stage_policy.shards_params:
            self.engine._user_weights.before_save()

    @member
    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters=False):
        """The same; raises ValueError where nothing is partitioned."""
        return self.engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    @member
    def _get_optimizer_ckpt_name(self, checkpoints_path, tag, expp_rank):
        """Path of the optimizer states of the experts of one expert-parallel rank, where ZeRO is off."""
        folder = os.path.join(checkpoints_path, str(tag))
        return EXPERT_OPTIM_STATES.path(folder, expp_rank=expp_rank, mp_rank=self.engine.mp_rank_for_files())

    @member
    def _get_zero_param_shapes(self):
        """One ordered dict name -> shape for each parameter group; None below ZeRO stage 1."""
        return param_shapes(self.run_state()) if self.engine.zero_optimization() else None
