"""What an engine is made of: the model placed and cast, the native core, the optimizer object around both."""

import functools

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.universal_checkpoint import enable_universal_checkpoint
from deepspeed.comm.mesh_views import MICS, Purpose
from deepspeed.engine.accessors import dtype_of
from deepspeed.engine.build_optimizer import build_optimizer
from deepspeed.log import log_dist
from deepspeed.ops.adam import FusedAdam
from deepspeed.utils.z3_leaf_module import apply_z3_leaf_module_config
from deepspeed.zero.bf16_optimizer import BF16_Optimizer
from deepspeed.zero.core import build_core
from deepspeed.zero.fp16_optimizer import FP16_Optimizer, FP16_UnfusedOptimizer
from deepspeed.zero.fused_state import FusedState, can_fuse, is_native
from deepspeed.zero.model import cast_sharded, move_module, shard_model, take_over
from deepspeed.zero.sharded_parameter import is_sharded
from deepspeed.zero.stage3 import DeepSpeedZeRoOffload, DeepSpeedZeroOptimizer_Stage3
from deepspeed.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.zero.stepping import Stepping
from deepspeed.zero.whole_params import WholeParams

KNOWN_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW)


class Assembly:
    """The part of the engine that runs once. Needs the configuration, the parallel groups and the device."""

    def _check_precision(self):
        accelerator = get_accelerator()
        if self.fp16_enabled() and not accelerator.is_fp16_supported():
            raise ValueError(
                f"fp16.enabled: fp16 is not supported on {accelerator.device_name()} here; use bf16 or fp32"
            )
        if self.bfloat16_enabled() and not accelerator.is_bf16_supported():
            raise ValueError(
                f"bf16.enabled: bf16 is not supported on {accelerator.device_name()} here; use fp16 or fp32"
            )

    def _grad_forms(self):
        """Parameters of which only touched rows travel: weights of embeddings, with ``sparse_gradients``."""
        forms = {}
        if not self.sparse_gradients_enabled():
            return forms
        for name, module in self.module.named_modules():
            if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
                forms[id(module.weight)] = max(2 if module.sparse else 1, forms.get(id(module.weight), 0))
                self.sparse_tensor_module_names.add(f"{name}.weight".lstrip("."))
        return forms

    def _place_model(self, dont_change_device):
        self._check_precision()
        dtype = torch.float16 if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else None
        dtype = dtype_of(self._config.param_dtype) or dtype
        with torch.no_grad():
            if dtype is not None:
                # Through .data, so that parameters keep their identity: optimizers and tied weights hold on to it.
                for param in self.module.parameters():
                    if is_sharded(param):
                        cast_sharded(param, dtype)
                    elif param.is_floating_point() and param.dtype != dtype:
                        param.data = param.data.to(dtype)
            buffer_dtype = dtype_of(self._config.buffer_dtype)
            if buffer_dtype is not None:
                for module in self.module.modules():
                    for name, buffer in module._buffers.items():
                        if buffer is not None and buffer.is_floating_point():
                            module._buffers[name] = buffer.to(buffer_dtype)
            if not dont_change_device:
                move_module(self.module, self.device)

    def _make_optimizer(self, model_parameters):
        self.basic_optimizer = build_optimizer(self._config, self.module, model_parameters, self.client_optimizer)
        groups = self.basic_optimizer.param_groups if self.basic_optimizer is not None else []
        self.trained_groups = [list(group["params"]) for group in groups]
        trained = [param for group in self.trained_groups for param in group]
        self._check_grad_dtype()
        optimizer = self.basic_optimizer
        policy = self._stage_policy
        if self.load_universal_checkpoint() and policy.shards_states and not policy.shards_params:
            enable_universal_checkpoint(trained)
        if self.zero_optimization():
            self._check_known(optimizer)
        if policy.shards_params:
            self._make_sharded_optimizer(optimizer)
            return
        if optimizer is None:
            self._broadcast_model()
            return
        self.core, self._param_names = build_core(optimizer.param_groups, **self._core_options())
        self._broadcast_model()
        self.core.refresh_master()
        managed = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._unmanaged = [p for p in self.module.parameters() if id(p) not in managed]
        if not self.zero_optimization():
            self._tell_of_missing_grads(trained)
        narrow = any(
            p.dtype in (torch.float16, torch.bfloat16) for group in optimizer.param_groups for p in group["params"]
        )
        if self.zero_optimization():
            self.optimizer = self._wrap_sharded(optimizer)
            self.stepping = self.optimizer.stepping
            return
        if narrow:
            self.optimizer = self._wrap_narrow(optimizer)
            self.stepping = self.optimizer.stepping
            self._whole = WholeParams(self.core, self.stepping, trained)
            return
        self.optimizer = optimizer
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.stepping = Stepping(
            self.core, optimizer, params, self._param_names, clip=self.gradient_clipping(), rank=self.global_rank
        )
        if can_fuse(optimizer, params):
            self.stepping.fused = FusedState(self.core, optimizer, params, self.stepping.step)
            optimizer.fused_state = self.stepping.fused
        self._whole = WholeParams(self.core, self.stepping, trained)

    def _core_options(self, shard=("dp",)):
        """What the native core is built with, apart from the parameters. ``shard``: the axes that are cut."""
        names, orders = {}, {}
        for order, (name, param) in enumerate(self.module.named_parameters()):
            names[id(param)], orders[id(param)] = name, order
        return {
            "config": self._config.native,
            "names": names,
            "orders": orders,
            "grad_forms": self._grad_forms(),
            "counts_in_norm": self.parallel.counts_in_norm if self.mp_world_size > 1 else None,
            "data_parallel": self.parallel.communicator(shard, Purpose.REDUCE),
            "model_parallel": self.parallel.model_parallel(),
            "grad_dtype": self._grad_dtype,
        }

    def kept_grad_dtype(self, param):
        """The dtype in which the gradient of ``param`` is kept."""
        return torch.float64 if param.dtype == torch.float64 else self._grad_dtype or param.dtype

    def _check_grad_dtype(self):
        given = self._config.grad_accum_dtype
        for group in self.trained_groups if given is not None else ():
            for param in group:
                if param.dtype == torch.float64:
                    names = [name for name, p in self.module.named_parameters() if p is param]
                    raise ValueError(
                        f'data_types.grad_accum_dtype "{given}": parameter \'{names[0] if names else "?"}\' is '
                        "float64, and its gradients stay so. Convert it, or leave data_types.grad_accum_dtype out"
                    )

    def _tell_of_missing_grads(self, params):
        """Stage 0: what scripts do to ``.grad`` between backward and step would silently do nothing."""
        other = [param.dtype for param in params if self.kept_grad_dtype(param) != param.dtype]
        if other:
            log_dist(
                f"Gradients are kept in {self._grad_dtype} (gradient_accumulation_steps is "
                f"{self.gradient_accumulation_steps()}, data_types.grad_accum_dtype {self._config.grad_accum_dtype}), "
                f"so {len(other)} parameters in {other[0]} have no .grad between backward and step: change gradients "
                "with deepspeed.utils.safe_set_full_grad, or set data_types.grad_accum_dtype to the parameters' type.",
                ranks=[0],
            )

    def _check_known(self, optimizer):
        """ZeRO cuts parameters into pieces: an optimizer that looks at whole ones would compute something else."""
        if getattr(optimizer, "states_in_one_piece", False):
            raise ValueError(
                f"{type(optimizer).__name__} packs the states of a parameter so that they cannot be cut into shards: "
                'use FusedAdam, whose states ZeRO shards, or "zero_optimization": {"stage": 0}.'
            )
        if optimizer is None or self.client_optimizer is None or self.zero_allow_untested_optimizer():
            return
        known = is_native(optimizer) or type(optimizer) in KNOWN_OPTIMIZERS
        assert known, (
            f"{type(optimizer).__name__} is not known to work on pieces of parameters, as ZeRO gives it. If it treats "
            'every element alone (as Adam, SGD, Adagrad or Lion do), set "zero_allow_untested_optimizer": true in the '
            "configuration; if it uses norms of whole parameters (as LAMB does), use ZeRO stage 0"
        )

    def _make_sharded_optimizer(self, optimizer):
        """ZeRO stage 3: shards what is not sharded yet; without an optimizer the model is only gathered and run."""
        groups = optimizer.param_groups if optimizer is not None else []
        managed = {id(p) for group in groups for p in group["params"]}
        self._unmanaged = [p for p in self.module.parameters() if id(p) not in managed]
        mics = self._config.mics_shard_size
        shard_group, (shard, copies) = self.parallel.dp_group if self.dp_world_size > 1 else None, (["dp"], [])
        if mics > 0:
            shard_group, (shard, copies) = self.parallel.cut_for_mics(mics), MICS
        self._shard_group = shard_group
        take_over(self.module)
        self._access = shard_model(self.module, self.parallel, shard_group)
        options = self._core_options(shard)
        trained_over = shard_group if shard_group is not None and self._access.access.world > 1 else None
        self.core, self._param_names = build_core(
            groups,
            others=self._unmanaged,
            gathers=functools.partial(self.parallel.communicator, shard, Purpose.GATHER),
            replicas=self.parallel.communicator(copies, Purpose.REDUCE),
            **options,
        )
        self._access.attach(self.module, self.core, None if optimizer is not None else self._release)
        apply_z3_leaf_module_config(self.module, self._config.zero_config.leaf_module)
        granularity = self._config.zero_config.module_granularity_threshold
        if optimizer is None:
            self.optimizer = DeepSpeedZeRoOffload(
                self.module,
                None,
                self._config,
                dp_process_group=trained_over,
                zero_module_granularity_threshold=granularity,
                core=self.core,
                mem_efficient_linear=self._config.zero_config.memory_efficient_linear,
            )
            self.parameter_offload = self.optimizer
            return
        self.core.refresh_master()
        self.optimizer = DeepSpeedZeroOptimizer_Stage3(
            self.module,
            optimizer,
            {},
            None,
            self._config,
            **self._scaler_options(),
            dp_process_group=trained_over,
            sub_group_size=self._config.zero_config.sub_group_size,
            mpu=self.mpu,
            clip_grad=self.gradient_clipping(),
            zero_module_granularity_threshold=granularity,
            engine=self,
            mem_efficient_linear=self._config.zero_config.memory_efficient_linear,
        )
        self.stepping = self.optimizer.stepping
        self.parameter_offload = self.optimizer.parameter_offload

    def _scaler_options(self):
        return {
            "static_loss_scale": (self._config.float16_config.loss_scale or 1.0) if self.fp16_enabled() else 1.0,
            "dynamic_loss_scale": self.dynamic_loss_scale(),
            "dynamic_loss_args": self.dynamic_loss_scale_args() if self.dynamic_loss_scale() else None,
        }

    def _given(self, section, key):
        """What the user wrote there, or None."""
        keys = self.config.get(section) if isinstance(self.config, dict) else None
        return keys.get(key) if isinstance(keys, dict) else None

    def _checks_overflow(self):
        return self.fp16_enabled() or (self.bfloat16_enabled() and self._config.bfloat16_config.check_grad_overflow)

    def core_for_optimizer(self, optimizer):
        """What a wrapping optimizer builds on: ``(core, parameter names, skip steps that are not finite, rank)``."""
        return self.core, self._param_names, self._checks_overflow(), self.global_rank

    def _wrap_narrow(self, optimizer):
        wrapper = FP16_Optimizer if is_native(optimizer) and isinstance(optimizer, FusedAdam) else FP16_UnfusedOptimizer
        options = self._scaler_options()
        if options["dynamic_loss_scale"] and self._given("fp16", "hysteresis") is None:
            options["dynamic_loss_args"]["delayed_shift"] = 1  # the key's own default speaks of the sharded stages
        return wrapper(
            optimizer,
            deepspeed=self,
            low_precision_dtype=torch.float16 if self.fp16_enabled() else torch.bfloat16,
            **options,
            mpu=self.mpu,
            clip_grad=self.gradient_clipping(),
        )

    def _wants_bf16_optimizer(self):
        """bf16 at stage 1 where the configuration asks for fp32 accumulation by name."""
        accumulate = dtype_of(self._config.grad_accum_dtype)
        elastic = self._config.zero_config.elastic_checkpoint
        policy = self._stage_policy
        states_alone = policy.shards_states and not policy.shards_grads
        return self.bfloat16_enabled() and states_alone and accumulate == torch.float32 and not elastic

    def _wrap_sharded(self, optimizer):
        if self._wants_bf16_optimizer():
            return BF16_Optimizer(
                optimizer,
                {},
                self._config.bfloat16_config,
                mpu=self.mpu,
                clip_grad=self.gradient_clipping(),
                dp_process_group=self.parallel.dp_group if self.dp_world_size > 1 else None,
                grad_acc_dtype=torch.float32,
                engine=self,
            )
        return DeepSpeedZeroOptimizer(
            optimizer,
            {},
            None,
            self.optimizer_params(),
            partition_grads=self._stage_policy.shards_grads,
            elastic_checkpoint=self._config.zero_config.elastic_checkpoint,
            **self._scaler_options(),
            dp_process_group=self.parallel.dp_group if self.dp_world_size > 1 else None,
            mpu=self.mpu,
            clip_grad=self.gradient_clipping(),
            engine=self,
        )

    def _broadcast_model(self):
        """All data-parallel ranks start from rank 0's parameters and buffers."""
        if self.dp_world_size == 1:
            return
        tensors = list(self.module.parameters()) + list(self.module.buffers())
        if self.core is not None:
            self.core.broadcast([t.detach() for t in tensors], 0)
            return
        source = self.parallel.source_rank()
        with torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor.detach(), source, group=self.parallel.dp_group)
