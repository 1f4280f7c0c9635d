"""What the engine tells about the section ``zero_optimization``. Each method is one line of the config."""


class ZeroAccessors:
    """Mixed into the engine; ``self._config`` is the parsed config."""

    def zero_allow_untested_optimizer(self):
        return self._config.zero_allow_untested_optimizer

    def zero_force_ds_cpu_optimizer(self):
        return self._config.zero_force_ds_cpu_optimizer

    def zero_optimization(self):
        return self._config.zero_optimization_stage > 0

    def zero_optimization_stage(self):
        return self._config.zero_optimization_stage

    def zero_optimization_partition_gradients(self):
        """Whether every rank keeps only its share of the gradients: stages 2 and 3."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self):
        """Whether every rank keeps only its share of the weights: stage 3."""
        return self.zero_optimization_stage() >= 3

    def is_first_weights_partition_group(self):
        """Stage 3: whether this rank belongs to the first group of ranks that holds a whole copy of the weights."""
        if not self.zero_optimization_partition_weights():
            return False
        return self.mics_shard_size() < 1 or self.get_data_parallel_rank() < self.mics_shard_size()

    # ---- gradients -------------------------------------------------------------------------------------------------
    def reduce_bucket_size(self):
        return self._config.zero_config.reduce_bucket_size

    def zero_reduce_bucket_size(self):
        return self._config.zero_config.reduce_bucket_size

    def zero_reduce_scatter(self):
        return self._config.zero_config.reduce_scatter

    def zero_overlap_comm(self):
        return self._config.zero_config.overlap_comm

    def zero_multi_rank_bucket_allreduce(self):
        return self._config.zero_config.use_multi_rank_bucket_allreduce

    def zero_contiguous_gradients(self):
        return self._config.zero_config.contiguous_gradients

    def zero_round_robin_gradients(self):
        return self._config.zero_config.round_robin_gradients

    def zero_ignore_unused_parameters(self):
        return self._config.zero_config.ignore_unused_parameters

    def zero_grad_hooks(self):
        """True: gradients are taken by hooks as autograd produces them; there is no other way here."""
        return True

    def zero_quantized_gradients(self):
        return self._config.zero_config.zero_quantized_gradients

    def zeropp_loco_param(self):
        return self._config.zero_config.zeropp_loco_param

    # ---- weights ---------------------------------------------------------------------------------------------------
    def zero_allgather_bucket_size(self):
        return self._config.zero_config.allgather_bucket_size

    def zero_allgather_partitions(self):
        return self._config.zero_config.allgather_partitions

    def zero_allgather_sequential(self):
        return self._config.zero_config.allgather_sequential

    def zero_prefetch_bucket_size(self):
        return self._config.zero_config.prefetch_bucket_size

    def zero_max_live_parameters(self):
        return self._config.zero_config.max_live_parameters

    def zero_max_reuse_distance(self):
        return self._config.zero_config.max_reuse_distance

    def zero_module_granularity_threshold(self):
        return self._config.zero_config.module_granularity_threshold

    def zero_param_persistence_threshold(self):
        return self._config.zero_config.param_persistence_threshold

    def zero_model_persistence_threshold(self):
        return self._config.zero_config.model_persistence_threshold

    def zero_log_trace_cache_warnings(self):
        return self._config.zero_config.log_trace_cache_warnings

    def is_sanity_checks_enabled(self):
        return self._config.zero_config.enable_sanity_checks

    def mics_shard_size(self):
        return self._config.mics_shard_size

    def zero_hpz_partition_size(self):
        return self._config.zero_config.zero_hpz_partition_size

    def zero_quantized_weights(self):
        return self._config.zero_config.zero_quantized_weights

    def zero_quantized_nontrainable_weights(self):
        return self._config.zero_config.zero_quantized_nontrainable_weights

    def zero_gather_16bit_weights_on_model_save(self):
        return self._config.zero_config.gather_16bit_weights_on_model_save

    # ---- optimizer states, and where things lie --------------------------------------------------------------------
    def zero_sub_group_size(self):
        return self._config.zero_config.sub_group_size

    def zero_legacy_stage1(self):
        return self._config.zero_config.legacy_stage1

    def zero_load_from_fp32_weights(self):
        return self._config.zero_config.load_from_fp32_weights

    def zero_elastic_checkpoint(self):
        return self._config.zero_config.elastic_checkpoint

    def zero_save_muon_momentum_buffer_in_memory(self):
        return self._config.zero_config.save_muon_momentum_buffer_in_memory

    def zero_offload_optimizer(self):
        """The section ``offload_optimizer``, or None."""
        return self._config.zero_config.offload_optimizer

    def zero_offload_param(self):
        """The section ``offload_param``, or None."""
        return self._config.zero_config.offload_param

    def _offload_device(self):
        section = self.zero_offload_optimizer()
        return "none" if section is None else str(getattr(section.device, "value", section.device))

    def zero_use_cpu_optimizer(self):
        """Whether the step runs on the CPU: optimizer states are offloaded to it, or through it to NVMe."""
        return self._offload_device() in ("cpu", "nvme")

    def zero_cpu_offload(self):
        return self._offload_device() == "cpu"

    def zero_nvme_offload_optimizer(self):
        return self._offload_device() == "nvme"

    def zero_partial_offload(self):
        """Share of the parameters whose step runs on the CPU (``offload_optimizer.ratio``); 0.0 without offload."""
        section = self.zero_offload_optimizer()
        return 0.0 if section is None else section.ratio

    def super_offload(self):
        section = self.zero_offload_optimizer()
        return False if section is None else section.super_offload

    def cpuadam_cores_perc(self):
        section = self.zero_offload_optimizer()
        return 0.8 if section is None else section.cpuadam_cores_perc

    def zenflow_config(self):
        return self._config.zero_config.zenflow

    def aio_config(self):
        return self._config.aio_config
