"""What an engine tells about its training, and the few numbers of it that may be changed."""


class Attributes:
    """Mixed into the engine."""

    has_moe_layers = False  # whether the model has layers of deepspeed.moe, which this build does not have

    def _start_counting(self, model):
        self.global_steps = 0  # steps at an accumulation boundary, skipped ones included
        self.global_samples = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self.gas_boundary_ctr = 0  # as global_steps, since this engine was made
        # The mean of the losses given to backward since the last step, on this rank, each over the accumulation steps:
        # their sum up to now. None where there was none.
        self.losses = None
        self.param_names = {param: name for name, param in model.named_parameters()}
        self._reduces_in_backward = True
        self._step_applied = False
        self._global_grad_norm = None

    @property
    def enable_backward_allreduce(self):
        """Whether backward reduces gradients at the accumulation boundary, as it does unless somebody sets this to
        False to call ``allreduce_gradients()`` later; the latest is ``step()``. At ZeRO stages 2 and 3, which keep no
        whole gradients, backward always reduces."""
        return self._reduces_in_backward

    @enable_backward_allreduce.setter
    def enable_backward_allreduce(self, value):
        self._reduces_in_backward = bool(value)
        self._replan()

    @property
    def inside_no_sync_ctxt(self):
        """True inside ``with engine.no_sync()``."""
        return self._in_no_sync

    def get_global_grad_norm(self):
        """2-norm of the gradients of the last step, before clipping; None before the first step."""
        return self._global_grad_norm

    def was_step_applied(self):
        """True when the last step() changed weights."""
        return self._step_applied

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_type(self):
        return [type(self.basic_optimizer).__name__]

    def get_mom(self):
        """Momentum of each group: ``betas`` for Adam-like optimizers, ``momentum`` for SGD-like ones."""
        return [
            group["betas"] if "betas" in group else group.get("momentum", 0.0) for group in self.optimizer.param_groups
        ]

    def get_pld_theta(self):
        """The share of layers that progressive layer dropping keeps now; None while it is off."""
        return None

    def get_wall_clock_timers(self):
        """The timers of ``wall_clock_breakdown``: ``timers("fwd").elapsed()`` and so on."""
        return self.progress.timers

    def get_data_parallel_rank(self):
        return self.parallel.dp_rank

    def get_model_parallel_rank(self):
        return self.parallel.mp_rank

    def get_tensor_parallel_rank(self):
        return self.parallel.mp_rank

    def get_sequence_parallel_group(self):
        return self.seq_parallel_group

    def mp_rank_for_files(self):
        """The model-parallel rank that file names carry."""
        return self.parallel.mp_rank
