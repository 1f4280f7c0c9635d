"""The training engine: a module that knows how to train itself on many ranks.

Python decides what happens; everything per tensor and per bucket happens in the native core (csrc/zero).
"""

from typing import Callable, Dict, Iterable, Union

import torch
from torch.optim.lr_scheduler import _LRScheduler

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.engines.base import make_engine
from deepspeed.checkpoint.save.save import expected_bytes
from deepspeed.config import DeepSpeedConfig, non_default_values
from deepspeed.engine import checks, cross_engine_scaling, parts
from deepspeed.engine.accessor_table import OWN_PATHS
from deepspeed.engine.accessors import ConfigAccessors
from deepspeed.engine.arguments import find_device_index, find_local_rank
from deepspeed.engine.build_scheduler import build_scheduler
from deepspeed.engine.finalizers import unlink_when_dropped
from deepspeed.engine.members import engine_parts, run_hooks
from deepspeed.engine.mesh import mesh_of
from deepspeed.host.blas import blas_warning
from deepspeed.host.product_error import product_warning
from deepspeed.log import log_dist, set_log_level_from_string, warning_once
from deepspeed.sequence import gradients
from deepspeed.utils.forwarding import answers_from
from deepspeed.utils.module_attributes import attribute_or_that_of_module

DeepSpeedOptimizerCallable = Callable[[Union[Iterable[torch.nn.Parameter], Dict[str, Iterable]]], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], _LRScheduler]


@answers_from(OWN_PATHS)
@engine_parts.compose(parts)
class DeepSpeedEngine(ConfigAccessors, torch.nn.Module):
    """Wraps ``model``; see ``deepspeed.initialize`` for the arguments. Its parts bring most members: ``members.py``."""

    _ranks = mesh_of
    has_moe_layers = False  # whether the model has layers of deepspeed.moe
    _destroyed = _taken_over = False

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
        self.client_optimizer, self.client_lr_scheduler = optimizer, lr_scheduler
        self.training_data, self.collate_fn = training_data, collate_fn
        self.mpu, self.mesh_device = mpu, mesh_device
        self._config = (
            config_class if config_class is not None else DeepSpeedConfig(config, mpu, mesh_device=mesh_device)
        )
        self.config = self._config._param_dict
        self.parallel = self._ranks(mpu)
        self.world_size, self.global_rank = self.parallel.world_size, self.parallel.rank
        self.dp_world_size, self.mp_world_size = self.parallel.data_world_size, self.parallel.mp_world_size
        self.data_parallel_group = self.parallel.data_group
        self.seq_parallel_group, self.sequence_parallel_size = self.parallel.sp_group, self.parallel.sp_world_size
        self.local_rank = find_local_rank(args)
        index = find_device_index(args, self.local_rank)
        self.device = torch.device(get_accelerator().device_name(index))
        get_accelerator().set_device(index)
        if self.log_level() is not None:
            set_log_level_from_string(self.log_level())

        if self.seq_parallel_group is not None:
            gradients.train_on(self, self.seq_parallel_group)
        self._parts.make(self)
        # Steps at an accumulation boundary, skipped ones included; and the same since this engine was made.
        self.global_steps = self.gas_boundary_ctr = 0
        self.global_samples = self.skipped_steps = 0
        # The mean of the losses given to backward since the last step, on this rank, each over the accumulation steps:
        # their sum up to now. None where there was none.
        self.losses = None
        self.loaded_engine_state = {}
        self.loaded_checkpoint_dp_world_size = None
        self.checkpoint_engine = make_engine(self._config)
        self.core = self.stepping = self.optimizer = self.basic_optimizer = None
        self.module = model
        self._autotuning.see_model(model)

        self._tensors.cut()
        model_parameters = self._experts.find(model_parameters)
        self._long_sequences.prepare()
        self.sparse_tensor_module_names = set(self._assembly.sparse_embeddings())
        self._assembly.move_model(dont_change_device)
        checks.check_device(self)
        self._assembly.make_optimizer(model_parameters)
        checks.check_step_strategy(self)
        checks.tell_of_unpinned(self)
        checks.tell_of_drives(self)
        self.lr_scheduler = build_scheduler(self._config, self.basic_optimizer, lr_scheduler)
        self._data.agree_on_seed()
        self.training_dataloader = self.deepspeed_io(training_data) if training_data is not None else None
        self._data.start_window()
        self._data.tell_length_of_epoch()
        self.monitor = self.progress.open_monitor()
        unlink_when_dropped(self)
        cross_engine_scaling.enter(self)
        self.tput_timer = self.progress.throughput
        if self.stepping is not None and self.zero_optimization():
            self.stepping.need_all = not self._config.zero_config.ignore_unused_parameters
        if hasattr(self.checkpoint_engine, "expect"):
            sizes = expected_bytes(self._checkpoints.run_state())
            self.checkpoint_engine.expect(sizes, pinned=self.device.type != "cpu")
        run_hooks(self, "start")
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
        if self.device.type == "cpu" and self.global_rank == 0:
            for text in (blas_warning(), product_warning() if self.bfloat16_enabled() else None):
                if text:
                    warning_once(text)

    def train(self, mode=True):
        self.module.train(mode)
        self.training = mode
        return self

    __getattr__ = attribute_or_that_of_module

    def empty_partition_cache(self):
        """Releases gathered parameters; below stage 3 there are none."""
        if self._stage_policy.shards_params and self.core is not None:
            self.parameter_offload.empty_partition_cache()

    def destroy(self):
        """Takes the engine off the model: hooks go, parameters get memory of their own again.

        Waits for a checkpoint on its way to the disk, and raises what went wrong with it when all else is done. The
        engine can neither train nor save afterwards; another call does nothing.
        """
        if self._destroyed:
            return
        try:
            if hasattr(self.checkpoint_engine, "cleanup"):
                self.checkpoint_engine.cleanup()
        finally:
            run_hooks(self, "stop")
            self._assembly.release()
            gradients.leave(self)
            self._destroyed = True
            log_dist("engine destroyed", ranks=[0], level=10)

    # ---- what the parts ask ------------------------------------------------------------------------------------------
    @property
    def _trains(self):
        return self.core is not None and self.stepping is not None

    def _need_alive(self, what):
        if self._taken_over:
            raise RuntimeError(
                f"{what}: a later deepspeed.initialize has made another engine of this engine's model, which ended "
                "this one. Use the engine that it returned"
            )
        if self._destroyed:
            raise RuntimeError(
                f"{what}: engine.destroy() has ended this engine; make a new one with deepspeed.initialize, or call "
                "destroy() later"
            )

    def _need_optimizer(self, what):
        self._need_alive(what)
        assert self.optimizer is not None, (
            f"{what} needs an optimizer: add an 'optimizer' section to the config or pass optimizer= to "
            "deepspeed.initialize"
        )

    def _need_states(self, kinds, what):
        states = getattr(self.optimizer, "states", None)
        if states is not None and states.away:
            states.need(kinds, what)
