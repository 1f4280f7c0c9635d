"""What the engine tells about features beside training proper. Each method is one line of the config; none has state.

A feature that this build does not have is off: the config refuses its switch.
"""


class FeatureAccessors:
    """Mixed into the engine; ``self._config`` is the parsed config."""

    # ---- checkpoints -----------------------------------------------------------------------------------------------
    def checkpoint_serialization_enabled(self):
        return self._config.checkpoint_config.checkpoint_serialization

    def checkpoint_writer_enabled(self):
        return self._config.checkpoint_config.writer is not None

    def checkpoint_tag_validation_enabled(self):
        return self._config.checkpoint_tag_validation_enabled

    def checkpoint_tag_validation_fail(self):
        return self._config.checkpoint_tag_validation_fail

    def load_universal_checkpoint(self):
        return self._config.load_universal_checkpoint

    def use_node_local_storage(self):
        return self._config.use_node_local_storage

    # ---- precision -------------------------------------------------------------------------------------------------
    def amp_enabled(self):
        return self._config.amp_enabled

    def amp_params(self):
        return self._config.amp_params

    def torch_autocast_enabled(self):
        return self._config.torch_autocast_enabled

    def torch_autocast_dtype(self):
        return self._config.torch_autocast_dtype

    def torch_autocast_lower_precision_safe_modules(self):
        return self._config.torch_autocast_lower_precision_safe_modules

    # ---- elasticity, parallelism -----------------------------------------------------------------------------------
    def elasticity_enabled(self):
        return self._config.elasticity_enabled

    def is_elastic_model_parallel_supported(self):
        """Whether the elasticity in use knows model parallelism: it does from version 0.2 on."""
        return self.elasticity_enabled() and float(self._config.elasticity_config.version) >= 0.2

    def tensor_parallel_config(self):
        return self._config.tensor_parallel_config

    def autotp_size(self):
        return self._config.tensor_parallel_config.autotp_size

    def graph_harvesting(self):
        return self._config.graph_harvesting

    # ---- flops profiler --------------------------------------------------------------------------------------------
    def flops_profiler_enabled(self):
        return self._config.flops_profiler_config.enabled or self.autotuning_enabled()

    def flops_profiler_recompute_fwd_factor(self):
        return self._config.flops_profiler_config.recompute_fwd_factor

    def flops_profiler_profile_step(self):
        step = self._config.flops_profiler_config.profile_step
        return self.autotuning_start_profile_step() if self.autotuning_enabled() else step

    def flops_profiler_module_depth(self):
        return self._config.flops_profiler_config.module_depth

    def flops_profiler_top_modules(self):
        return self._config.flops_profiler_config.top_modules

    def flops_profiler_detailed(self):
        return False if self.autotuning_enabled() else self._config.flops_profiler_config.detailed

    def flops_profiler_output_file(self):
        return self._config.flops_profiler_config.output_file

    # ---- autotuning ------------------------------------------------------------------------------------------------
    def autotuning_enabled(self):
        return self._config.autotuning_config.enabled

    def autotuning_start_profile_step(self):
        return self._config.autotuning_config.start_profile_step

    def autotuning_end_profile_step(self):
        return self._config.autotuning_config.end_profile_step

    def autotuning_metric_path(self):
        return self._config.autotuning_config.metric_path

    def autotuning_model_info_path(self):
        return self._config.autotuning_config.model_info_path

    def autotuning_metric(self):
        return self._config.autotuning_config.metric

    def autotuning_profile_model_info(self):
        """Whether the autotuner asked this run only for facts about the model."""
        info = self._config.autotuning_config.model_info
        return bool(self.autotuning_enabled() and info and info.get("profile", False))

    # ---- eigenvalues, layer drop, curriculum, data efficiency ------------------------------------------------------
    def eigenvalue_enabled(self):
        return self._config.eigenvalue_enabled

    def eigenvalue_verbose(self):
        return self._config.eigenvalue_verbose

    def eigenvalue_max_iter(self):
        return self._config.eigenvalue_max_iter

    def eigenvalue_tol(self):
        return self._config.eigenvalue_tol

    def eigenvalue_stability(self):
        return self._config.eigenvalue_stability

    def eigenvalue_gas_boundary_resolution(self):
        return self._config.eigenvalue_gas_boundary_resolution

    def eigenvalue_layer_name(self):
        return self._config.eigenvalue_layer_name

    def eigenvalue_layer_num(self):
        return self._config.eigenvalue_layer_num

    def pld_enabled(self):
        return self._config.pld_enabled

    def pld_params(self):
        return self._config.pld_params

    def pld_theta(self):
        return self._config.pld_params["theta"]

    def pld_gamma(self):
        return self._config.pld_params["gamma"]

    def curriculum_enabled_legacy(self):
        return self._config.curriculum_enabled_legacy

    def curriculum_params_legacy(self):
        return self._config.curriculum_params_legacy

    def data_efficiency_enabled(self):
        return self._config.data_efficiency_enabled

    def data_efficiency_config(self):
        return self._config.data_efficiency_config

    def data_sampling_enabled(self):
        return self.data_sampling_config()["enabled"]

    def data_sampling_config(self):
        return self._config.data_efficiency_config["data_sampling"]

    def curriculum_learning_enabled(self):
        return self.curriculum_learning_config()["enabled"]

    def curriculum_learning_config(self):
        return self.data_sampling_config()["curriculum_learning"]

    def random_ltd_enabled(self):
        return self.random_ltd_config()["enabled"]

    def random_ltd_config(self):
        return self._config.data_efficiency_config["data_routing"]["random_ltd"]
