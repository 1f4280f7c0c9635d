"""The weights of micro-batches of different sizes, and learning rates that follow the sizes."""

from deepspeed._native import DeepSpeedConfigError
from deepspeed.data.token_batches import Window
from deepspeed.engine.members import Part, engine_parts
from deepspeed.log import warning_once
from deepspeed.optim.scaled_rates import ScaledRates
from deepspeed.pipe.module import PipelineModule

_AT = "data_efficiency.data_sampling.dynamic_batching"
_CALL = (
    "call deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr."
    "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed after deepspeed.initialize"
)


@engine_parts.add("_dynamic")
class DynamicBatching(Part):
    """A part of the engine. Before ``use`` it does nothing.

    Every rank knows the micro-batches of all ranks, so ranks do not communicate. Outside of pipelines the micro-batch
    under way is the last one that the loader has handed out. In pipelines each ``train_batch`` takes those of one step.
    """

    batches = rates = None  # the ``TokenBatches`` of the engine's loader, and the ``ScaledRates``
    _in_step = False  # whether a step of the optimizer runs, in which the schedule moves to the next step
    _taken = None  # the ``Window`` of the next step in a pipeline, whose middle stages have no data
    _seen = None  # the ``Window`` after the batch that the last forward has taken

    def __init__(self, engine):
        super().__init__(engine)
        sampling = engine.data_sampling_config()
        on = engine.data_efficiency_enabled() and engine.data_sampling_enabled()
        self.enabled = on and sampling["dynamic_batching"]["enabled"]
        if not self.enabled:
            return
        if not engine.managed_gradient_accumulation():
            raise DeepSpeedConfigError(
                f"{_AT} needs to know the micro-batches of a step: set managed_gradient_accumulation to true"
            )
        if engine.curriculum_enabled_legacy():
            raise DeepSpeedConfigError(
                f"{_AT} counts tokens by the lengths of the samples, and curriculum_learning cuts the samples: enable "
                "only one of them"
            )
        if sampling["curriculum_learning"]["enabled"]:
            raise DeepSpeedConfigError(
                f"{_AT} and data_efficiency.data_sampling.curriculum_learning both choose the samples of a batch: "
                "enable only one of them"
            )
        if engine.training_data is not None:
            raise DeepSpeedConfigError(
                f"{_AT} needs a loader that knows the lengths of samples: do not pass training_data, and {_CALL}"
            )

    def use(self, loader, method):
        """The engine trains on ``loader`` from now on. Its learning rates follow the batches by ``method``."""
        engine = self.engine
        engine.training_dataloader, self.batches = loader, loader.data_sampler
        engine._data.start_window()
        self._taken = self._seen = self._at_loader()
        if self._pipelined:
            engine._batches.begin()
        if engine.basic_optimizer is not None:
            engine.lr_scheduler = self.rates = ScaledRates(
                engine.basic_optimizer, engine.lr_scheduler, self._next_ratio, method
            )

    # ---- positions ---------------------------------------------------------------------------------------------------
    @property
    def _pipelined(self):
        return isinstance(self.engine.module, PipelineModule)

    def _at_loader(self):
        """The window that begins after the last batch that the loader has handed out."""
        return Window(*self.engine.training_dataloader.position)

    def _window(self):
        """The ``Window`` of the step under way; None if the loader has not handed out a batch for it."""
        if self._pipelined:
            return self.batches.following(self._taken)
        window = self._at_loader()
        first = window.first - 1 - self.engine._window.index
        return None if first < 0 else window._replace(first=first)

    def _next_ratio(self):
        if self._pipelined:
            after = self._taken._replace(first=self._taken.first + self.batches.steps) if self._in_step else self._taken
        else:
            after = self._at_loader()
        return self._ratio(self.batches.following(after))

    def _ratio(self, window):
        return self.batches.samples_in(window) / self.engine.train_batch_size()

    # ---- what other parts ask ----------------------------------------------------------------------------------------
    def weight(self, micro=None):
        """The factor for the loss of a micro-batch of this step; by default, of the one under way."""
        window = None if self.batches is None else self._window()
        if window is None:
            return 1.0
        return self.batches.weight(window, self.engine._window.index if micro is None else micro)

    def tokens(self, micro=None):
        """The tokens of a micro-batch of this step; by default, of the one under way. None if they are not known."""
        window = None if self.batches is None else self._window()
        if window is None:
            return None
        return self.batches.tokens_in(window, self.engine._window.index if micro is None else micro)

    def samples(self):
        """The samples of this step, over all ranks. None if they are not known."""
        window = None if self.batches is None else self._window()
        return None if window is None else self.batches.samples_in(window)

    # ---- hooks -------------------------------------------------------------------------------------------------------
    def see_inputs(self, inputs, kwargs):
        if self.batches is None:
            if self.enabled:
                warning_once(f"{_AT} is enabled, but the engine has no loader of dynamic batches: {_CALL}", key=_AT)
            return
        self._tell_of_batches_ahead()
        window = self._window()
        if window is not None and self.rates is not None and not self.engine._window.index:
            self.rates.rescale(self._ratio(window))  # the expected one, unless a loop over the loader was left

    def _tell_of_batches_ahead(self):
        if self._pipelined or not self.engine.module.training:
            return
        before, self._seen = self._seen, self._at_loader()
        handed = self._seen.first - before.first if self._seen[:2] == before[:2] else 1  # else another epoch
        if handed > 1:
            warning_once(
                f"the loader of dynamic batches has handed out {handed} micro-batches since the last forward, and the "
                "engine weights the loss by the last of them. If this forward trains on an earlier one, its weight is "
                "wrong: take a micro-batch from the loader only when the one before has been trained on. Loaders that "
                "fetch ahead, as those of accelerate do, cannot be used with dynamic batches.",
                key=f"{_AT}: ahead",
            )

    def before_micro_step(self, boundary):
        self._in_step = boundary

    def failed_step(self):
        self._in_step = False

    def after_micro_step(self, boundary):
        self._in_step = False
        if boundary and self._taken is not None and self._pipelined:
            window = self.batches.following(self._taken)
            self._taken = window._replace(first=window.first + self.batches.steps)

    def after_load(self):
        if self.batches is None:
            return
        self._taken = self._seen = self._at_loader()
        if self.rates is not None:
            self.rates.rescale(self._next_ratio())
