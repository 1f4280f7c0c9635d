"""Assembles an engine: moves and casts the model, makes the native core and the optimizer object around both."""

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint.universal_checkpoint import enable_universal_checkpoint
from deepspeed.comm.mesh_views import cut_by_host, cut_for_mics, cut_for_second_copy
from deepspeed.engine import checks
from deepspeed.engine.accessors import dtype_of
from deepspeed.engine.build_optimizer import build_optimizer
from deepspeed.engine.cross_engine_scaling import others_of
from deepspeed.engine.fp32_buffers import cast_buffers, patterns_of
from deepspeed.engine.members import Part, engine_parts, member
from deepspeed.engine.shared_values import SharedValues
from deepspeed.log import logger
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.by_name import is_native, rules_of
from deepspeed.published.bf16_optimizer import BF16_Optimizer
from deepspeed.published.fp16_optimizer import FP16_Optimizer, FP16_UnfusedOptimizer
from deepspeed.published.stage3 import DeepSpeedZeRoOffload, DeepSpeedZeroOptimizer_Stage3
from deepspeed.published.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.z3_leaf_module import apply_z3_leaf_module_config
from deepspeed.zero.core import build_core
from deepspeed.zero.engine_links import EngineLink
from deepspeed.zero.gathers.model import detach, move_module, shard_model, take_over, wishes_of
from deepspeed.zero.optimizers.stepping import Stepping
from deepspeed.zero.parameters.param_ranks import SavedNames, broadcast_own_buffers, ranks_of
from deepspeed.zero.parameters.sharded_parameter import is_sharded
from deepspeed.zero.states.param_states import WholeParams

_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


@engine_parts.add("_assembly")
class Assembly(Part):
    """A part of the engine, which works once. Needs the configuration, the parallel groups and the device.

    The engine gets ``basic_optimizer`` (torch's, or None), ``optimizer`` (what wraps it), ``trained_groups``, and where
    there is something to train or to gather ``core`` and ``stepping``.
    """

    shard_group = whole = shared = None
    made_groups = ()  # hyperparameters of the optimizer's groups as the configuration and the caller gave them

    def move_model(self, dont_change_device):
        engine, module = self.engine, self.engine.module
        checks.check_precision(engine)
        dtype = torch.float16 if engine.fp16_enabled() else torch.bfloat16 if engine.bfloat16_enabled() else None
        dtype = dtype_of(engine._config.param_dtype) or dtype
        buffer_dtype = dtype_of(engine._config.buffer_dtype)
        with torch.no_grad():
            # Through .data, so that parameters keep their identity: optimizers and tied weights hold on to it.
            for param in module.parameters() if dtype is not None else ():
                own = param.ds_handle if is_sharded(param) else param
                if own.dtype.is_floating_point and own.dtype != dtype:
                    if own is param:
                        param.data = param.data.to(dtype)
                    else:
                        own.cast(dtype)
            kept = patterns_of(module, engine._config.keep_in_fp32_modules, engine.fp16_enabled())
            if buffer_dtype is not None:
                cast_buffers(module, buffer_dtype, kept)
            if not dont_change_device:
                move_module(module, engine.device)

    def _take_over(self, trained):
        """Ends other engines that train these parameters: they would reduce and update them, too."""
        engine = self.engine
        own, whole = set(map(id, trained)), set(map(id, engine.module.parameters()))
        for other in others_of(engine):
            theirs = {id(param) for group in other.trained_groups for param in group}
            # Each engine of stage 3 gathers all parameters of its model.
            sharded = engine._stage_policy.shards_params or other._stage_policy.shards_params
            if theirs & (whole if sharded else own):
                logger.warning(
                    "deepspeed.initialize: another engine trains parameters of this model, and is ended. Its next "
                    "backward or step is an error; call engine.destroy() before, to end it without this warning"
                )
                other.destroy()
                other._taken_over = True

    def make_optimizer(self, model_parameters):
        engine = self.engine
        optimizer = build_optimizer(
            engine._config, engine.module, model_parameters, engine.client_optimizer, engine.zero_use_cpu_optimizer()
        )
        groups = optimizer.param_groups if optimizer is not None else []
        self.made_groups = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        engine.basic_optimizer = optimizer
        engine.trained_groups = [list(group["params"]) for group in groups]
        trained = [param for group in engine.trained_groups for param in group]
        checks.check_trained(engine)
        checks.check_frozen_rows(engine)
        self._take_over(trained)
        managed = set(map(id, trained))
        engine._unmanaged = [param for param in engine.module.parameters() if id(param) not in managed]
        checks.check_grad_dtype(engine)
        policy, zero = engine._stage_policy, engine.zero_optimization()
        self.shared = SharedValues(engine.module, trained, policy.shards_params)
        if engine.load_universal_checkpoint() and policy.shards_states and not policy.shards_params:
            enable_universal_checkpoint(trained)
        if zero:
            checks.check_known(engine, optimizer)
            checks.check_offload(engine, optimizer)
        if policy.shards_params:
            self._make_sliced_optimizer(optimizer, groups)
            return
        if optimizer is None:
            self.engine._broadcast_model()
            return
        engine.core, engine._param_names = build_core(groups, **self._core_options())
        self.shared.share()
        self.engine._broadcast_model()
        engine.core.refresh_master()
        if not zero:
            checks.tell_of_missing_grads(engine, trained)
        if zero or any(param.dtype in (torch.float16, torch.bfloat16) for param in trained):
            engine.optimizer = self._wrap_sharded(optimizer) if zero else self._wrap_narrow(optimizer)
            engine.stepping = engine.optimizer.stepping
        else:
            engine.optimizer = optimizer
            engine.stepping = Stepping(
                engine.core,
                optimizer,
                trained,
                engine._param_names,
                clip=engine.gradient_clipping(),
                rank=engine.global_rank,
            )
        if not zero:
            self.whole = WholeParams(engine.core, engine.stepping, trained)
        for param in engine.module.parameters():
            param._ds_core = EngineLink(engine.core)

    def release(self):
        """The work of ``destroy``: afterwards the parameters refer to no engine."""
        engine = self.engine
        if engine.core is None:
            return
        if self.whole is not None:
            self.whole.unlink()
        for param in engine.module.parameters():
            param.__dict__.pop("_ds_core", None)
        if engine.zero_optimization():
            if engine._stage_policy.shards_params:
                detach(engine.module, self.shard_group, engine.parallel.dp_group)
            engine.optimizer.destroy()
        if engine.stepping is not None:
            engine.stepping.release()
        engine.core.release()
        engine.core = None
        self.shared.share()

    # ---- the core ----------------------------------------------------------------------------------------------------
    def _core_options(self):
        """The arguments of the native core, apart from the parameters."""
        engine, names, orders, saved = self.engine, {}, {}, SavedNames(self.engine.module)
        for order, (name, param) in enumerate(engine.module.named_parameters()):
            names[id(param)], orders[id(param)] = saved(name), order
        return {
            "config": engine._config.native,
            "names": names,
            "orders": orders,
            "grad_forms": self._grad_forms(),
            "copied_along": engine.parallel.copied_along if engine.mp_world_size > 1 else None,
            "mesh": engine.parallel.mesh,
            "grad_dtype": engine._grad_dtype,
            "rules": rules_of(engine.basic_optimizer),
            "window": engine._window,
        }

    def sparse_embeddings(self):
        """``{name of its weight: module}`` of each embedding of whose gradient only touched rows travel: of all, with
        ``sparse_gradients``."""
        return {
            f"{name}.weight".lstrip("."): module
            for name, module in self.engine.module.named_modules()
            if self.engine.sparse_gradients_enabled() and isinstance(module, _EMBEDDINGS)
        }

    def _grad_forms(self):
        forms = {}
        for module in self.sparse_embeddings().values():
            forms[id(module.weight)] = max(2 if module.sparse else 1, forms.get(id(module.weight), 0))
        return forms

    @member
    def kept_grad_dtype(self, param):
        """The dtype in which the gradient of ``param`` is kept."""
        return torch.float64 if param.dtype == torch.float64 else self.engine._grad_dtype or param.dtype

    @member
    def core_for_optimizer(self, optimizer):
        """The base of a wrapping optimizer: ``(core, parameter names, skip steps that are not finite, rank)``."""
        engine = self.engine
        checks_bf16 = engine.bfloat16_enabled() and engine._config.bfloat16_config.check_grad_overflow
        return engine.core, engine._param_names, engine.fp16_enabled() or checks_bf16, engine.global_rank

    @member
    def _broadcast_model(self):
        """All data-parallel ranks start from rank 0's parameters and buffers."""
        engine = self.engine
        if engine.parallel.dp_world_size == 1:
            return
        dense = []
        for param in engine.module.parameters():
            if ranks_of(param) is None:
                dense.append(param)
            else:  # other ranks train another parameter instead
                copies, here = ranks_of(param).copies, param.detach().to(engine.device)
                dist.broadcast(here, dist.get_global_rank(copies, 0), group=copies)
                param.detach().copy_(here)
        tensors = [t.detach() for t in (*dense, *broadcast_own_buffers(engine.module))]
        for away in [tensor for tensor in tensors if tensor.device.type != engine.device.type]:  # it rests on the host
            here = away.to(engine.device)
            dist.broadcast(here, dist.get_global_rank(engine.parallel.dp_group, 0), group=engine.parallel.dp_group)
            away.copy_(here)
        tensors = [tensor for tensor in tensors if tensor.device.type == engine.device.type]
        if engine.core is not None:
            engine.core.broadcast(tensors, 0)
            return
        source = dist.get_global_rank(engine.parallel.dp_group, 0)
        for tensor in tensors:
            dist.broadcast(tensor, source, group=engine.parallel.dp_group)

    # ---- the optimizer objects ---------------------------------------------------------------------------------------
    def _common(self):
        """Arguments of all wrapping optimizers."""
        engine = self.engine
        return {
            "static_loss_scale": (engine._config.float16_config.loss_scale or 1.0) if engine.fp16_enabled() else 1.0,
            "dynamic_loss_scale": engine.dynamic_loss_scale(),
            "dynamic_loss_args": engine.dynamic_loss_scale_args() if engine.dynamic_loss_scale() else None,
            "mpu": engine.mpu,
            "clip_grad": engine.gradient_clipping(),
        }

    def _second_copy(self, size, alone, mics):
        """Makes groups of ``size`` ranks that have a second copy of the parameters together (hpZ), or, if the
        configuration asks for hierarchical gathers of MiCS, of the ranks of one host among ``mics`` ranks."""
        engine, zero = self.engine, self.engine._config.zero_config
        asked = {
            "zero_hpz_partition_size": size > 1,
            "zero_quantized_weights": zero.zero_quantized_weights,
            "mics_hierarchical_params_gather": zero.mics_hierarchical_params_gather and mics > 0,
        }
        keys = [key for key, on in asked.items() if on]
        if alone:
            if keys:
                logger.info("%s: without effect, because one rank trains the model alone", " and ".join(keys))
        elif mics > 0 and size > 1:
            raise ValueError(
                "zero_optimization.mics_shard_size: zero.Init was given zero_param_parallel_group, and the two exclude "
                "each other: leave one of them out, or use mics_hierarchical_params_gather"
            )
        elif "mics_hierarchical_params_gather" in keys:
            engine._access.access.second_group = cut_by_host(engine.parallel.mesh, engine.parallel.dp_group, mics)
            if engine._access.access.second_group is None:
                logger.info(
                    "mics_hierarchical_params_gather: without effect, because the %d ranks that share one copy of the "
                    "model are on one host, or do not divide into neighbours on hosts",
                    mics,
                )
        elif size > 1:
            engine._access.access.second_group = cut_for_second_copy(engine.parallel.mesh, size)

    def _make_sliced_optimizer(self, optimizer, groups):
        """ZeRO stage 3: shards what is not sharded yet; without an optimizer the model is only gathered and run."""
        engine, zero = self.engine, self.engine._config.zero_config
        mics = engine._config.mics_shard_size
        alone = engine.parallel.world_size == 1  # one copy of several stages is a group of one rank
        group = None if alone else engine.parallel.dp_group
        if mics > 0:
            group = cut_for_mics(engine.parallel.mesh, mics)
        self.shard_group = group
        take_over(engine.module)
        made_by = wishes_of(engine.module)
        engine._access = shard_model(engine.module, engine.parallel, group, engine.device)
        size = zero.zero_hpz_partition_size if zero.zero_hpz_partition_size > 1 else made_by.size
        self._second_copy(size, alone, mics)
        options = self._core_options()
        codes = {"codes_weights": made_by.codes_weights, "codes_frozen": made_by.codes_frozen}
        engine.core, engine._param_names = build_core(groups, others=engine._unmanaged, **codes, **options)
        give_up = None if optimizer is not None else self.release
        engine._access.attach(engine.module, engine.core, give_up, checks_writes=zero.enable_sanity_checks)
        apply_z3_leaf_module_config(engine.module, zero.leaf_module)
        common = {
            "dp_process_group": group if group is not None and engine._access.access.world > 1 else None,
            "zero_module_granularity_threshold": zero.module_granularity_threshold,
            "mem_efficient_linear": zero.memory_efficient_linear,
        }
        if optimizer is None:
            engine.optimizer = DeepSpeedZeRoOffload(engine.module, None, engine._config, core=engine.core, **common)
            engine.parameter_offload = engine.optimizer
            return
        engine.core.refresh_master()
        engine.optimizer = DeepSpeedZeroOptimizer_Stage3(
            engine.module,
            optimizer,
            {},
            None,
            engine._config,
            sub_group_size=zero.sub_group_size,
            engine=engine,
            **common,
            **self._common(),
        )
        engine.stepping = engine.optimizer.stepping
        engine.parameter_offload = engine.optimizer.parameter_offload

    def _wrap_narrow(self, optimizer):
        wrapper = FP16_Optimizer if is_native(optimizer) and isinstance(optimizer, FusedAdam) else FP16_UnfusedOptimizer
        engine, options = self.engine, self._common()
        keys = engine.config.get("fp16") if isinstance(engine.config, dict) else None
        given = keys.get("hysteresis") if isinstance(keys, dict) else None
        if options["dynamic_loss_scale"] and given is None:
            options["dynamic_loss_args"]["delayed_shift"] = 1  # the key's own default speaks of the sharded stages
        dtype = torch.float16 if engine.fp16_enabled() else torch.bfloat16
        return wrapper(optimizer, deepspeed=engine, low_precision_dtype=dtype, **options)

    def _wants_bf16_optimizer(self):
        """bf16 at stage 1 where the configuration asks for fp32 accumulation by name."""
        engine, policy = self.engine, self.engine._stage_policy
        accumulate = dtype_of(engine._config.grad_accum_dtype)
        states_alone = policy.shards_states and not policy.shards_grads
        elastic = engine._config.zero_config.elastic_checkpoint
        return engine.bfloat16_enabled() and states_alone and accumulate == torch.float32 and not elastic

    def _wrap_sharded(self, optimizer):
        engine, common = self.engine, self._common()
        common["dp_process_group"] = engine.parallel.dp_group if engine.parallel.dp_world_size > 1 else None
        if self._wants_bf16_optimizer():
            common = {key: common[key] for key in ("mpu", "clip_grad", "dp_process_group")}
            section = engine._config.bfloat16_config
            return BF16_Optimizer(optimizer, {}, section, grad_acc_dtype=torch.float32, engine=engine, **common)
        return DeepSpeedZeroOptimizer(
            optimizer,
            {},
            None,
            engine.optimizer_params(),
            partition_grads=engine._stage_policy.shards_grads,
            elastic_checkpoint=engine._config.zero_config.elastic_checkpoint,
            engine=engine,
            **common,
        )
