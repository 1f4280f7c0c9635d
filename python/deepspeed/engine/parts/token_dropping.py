"""Random-LTD: sets the number of tokens that layers keep in a step, and reports lengths and tokens."""

from deepspeed.data.random_ltd import RandomLTDScheduler, TokenDropping, TokenDroppingForward
from deepspeed.engine.members import Part, engine_parts, member
from deepspeed.log import warning_once
from deepspeed.pipe.module import PipelineModule

_SIZES = {"micro_batch_size": "train_micro_batch_size_per_gpu", "global_batch_size": "train_batch_size"}


@engine_parts.add("_token_dropping")
class TokenDroppingPart(Part):
    """A part of the engine. It does nothing while random-LTD is off."""

    engine_attributes = ("random_ltd_scheduler",)
    random_ltd_scheduler = None  # while random-LTD is off
    _plan = _layers = None  # and the layers that were converted, in their order

    def __init__(self, engine):
        super().__init__(engine)
        if not engine.random_ltd_enabled():
            return
        config = engine.random_ltd_config()
        for key, size in _SIZES.items():
            if config[key] is not None and config[key] != getattr(engine, size)():
                raise ValueError(
                    f"data_efficiency.data_routing.random_ltd.{key} is {config[key]}, and {size} is "
                    f"{getattr(engine, size)()}: both must be equal. Leave {key} out"
                )
        if engine.sequence_parallel_size > 1:
            raise ValueError(
                f"data_efficiency.data_routing.random_ltd: {engine.sequence_parallel_size} ranks share a sequence "
                "(sequence_parallel_size). Each rank has only a part of its tokens, so no rank can choose among all of "
                "them. Set random_ltd.enabled to false, or sequence_parallel_size to 1"
            )
        self.random_ltd_scheduler = RandomLTDScheduler({**config, "global_batch_size": engine.train_batch_size()})

    def start(self):
        forwards = TokenDroppingForward.released(self.engine.module)  # by an earlier engine
        if self.random_ltd_scheduler is not None and forwards:
            self.random_ltd_initialize()

    @member
    def random_ltd_initialize(self):
        """Lets the layers that were converted drop tokens; ``convert_to_random_ltd`` calls it."""
        engine = self.engine
        if self.random_ltd_scheduler is None:
            raise ValueError(
                "the model was converted to random-LTD, and the configuration does not enable it: set enabled to true "
                "in data_efficiency, data_routing and random_ltd, or do not call convert_to_random_ltd"
            )
        if isinstance(engine.module, PipelineModule):
            raise ValueError(
                "random-LTD does not work in a pipeline, because a stage knows only its own layers, and recomputes "
                "micro-batches after it has begun others. Use ZeRO without a pipeline"
            )
        ranks = engine.parallel.data_rank, engine.parallel.data_world_size
        seed = engine.data_efficiency_config()["seed"]
        plan = TokenDropping(self.random_ltd_scheduler, engine.random_ltd_config(), seed, *ranks)
        forwards = TokenDroppingForward.of(engine.module)
        plan.take(forwards)
        self._plan, self._layers = plan, [forward.layer for forward in forwards.values()]

    def see_inputs(self, inputs, kwargs):
        if self.random_ltd_scheduler is None or not self.engine.training:
            return
        self.random_ltd_scheduler.update_seq(self.engine.global_steps)
        if self._plan is None:
            warning_once("random_ltd is enabled, but no layer drops tokens: call convert_to_random_ltd(engine, class).")
            return
        self._plan.step, self._plan.micro_step = self.engine.global_steps, self.engine._window.index

    def layer_tokens(self):
        """The sum of the tokens of all layers, including the step under way. None if random-LTD is off."""
        return None if self.random_ltd_scheduler is None else self.random_ltd_scheduler.consumed_layer_tokens

    def _lengths(self, unknown=None):
        """``(tokens of a sample, [those that each layer has got])`` in the last micro-batch. Layers that progressive
        layer dropping has left out have got none. ``unknown`` takes the place of the first number where no layer has
        told it; without ``unknown`` it is ``(None, [])`` then."""
        if self._plan is None:
            return None, []
        left_out, told = self.engine._layer_dropping.dropped_layers(), self._plan.lengths
        ran = [number for number, layer in enumerate(self._layers) if layer not in left_out]
        whole = max((told[number][0] for number in ran if number in told), default=unknown)
        if whole is None:
            return None, []
        kept = {number: told.get(number, (whole, whole))[1] for number in ran}
        return whole, [kept.get(number, 0) for number in range(len(self._layers))]

    def effective_tokens(self, tokens):
        whole, lengths = self._lengths(unknown=1)
        return tokens if whole is None else tokens * sum(lengths) / (whole * len(lengths))

    @member
    def data_efficiency_report(self):
        """Lengths of the last micro-batch and sums over all steps up to now, as a dict. Unknown values are None.

        - ``step``: the number of steps done.
        - ``sequence_length``: the tokens of a sample, after a curriculum has cut it.
        - ``layer_lengths``: the tokens of a sample that each layer has got, by its number; 0 where progressive layer
          dropping has left it out.
        - ``effective_length``: their mean over the layers.
        - ``kept_tokens``: the number that the schedule of random-LTD gives.
        - ``consumed_tokens``: the sum of effective lengths over samples, ranks and steps.
        - ``consumed_layer_tokens``: the same times the number of layers, computed from the schedule of random-LTD
          alone.
        - ``layers_left_out``: the layers that progressive layer dropping has left out in that micro-batch.
        - ``layer_probability``: the probability with which it keeps a layer.
        """
        engine, scheduler = self.engine, self.random_ltd_scheduler
        whole, lengths = self._lengths()
        return {
            "step": engine.global_steps,
            "sequence_length": whole,
            "layer_lengths": lengths,
            "effective_length": None if whole is None else sum(lengths) / len(lengths),
            "kept_tokens": None if scheduler is None else scheduler.get_current_seq(),
            "consumed_tokens": engine._tokens.saved,
            "consumed_layer_tokens": self.layer_tokens(),
            "layers_left_out": engine._layer_dropping.dropped(),
            "layer_probability": engine.get_pld_theta(),
        }

    # ---- in checkpoints ----------------------------------------------------------------------------------------------
    def state(self):
        return None if self.random_ltd_scheduler is None else self.random_ltd_scheduler.state_dict()

    def load(self, state):
        """Restores the state of a checkpoint at step ``engine.global_steps``. It is None if random-LTD was off
        there."""
        scheduler = self.random_ltd_scheduler
        if scheduler is None:
            return
        scheduler.reset_to_init()
        steps = self.engine.global_steps
        known = {"consumed_layer_tokens": 0, "curr_step": steps - 1, "current_value": scheduler.get_value(steps)}
        scheduler.load_state_dict({**known, **(state or {})})
