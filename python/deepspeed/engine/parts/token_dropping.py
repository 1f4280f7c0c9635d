"""Random-LTD: sets the number of tokens that layers keep in a step, and reports the tokens of a step."""

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
    _plan = None

    def __init__(self, engine):
        super().__init__(engine)
        if not engine.random_ltd_enabled():
            return
        config = engine.random_ltd_config()
        for key, size in _SIZES.items():
            if config[key] is not None and config[key] != getattr(engine, size)():
                raise ValueError(
                    f"data_efficiency.data_routing.random_ltd.{key} is {config[key]}, and {size} is "
                    f"{getattr(engine, size)()}: leave {key} out"
                )
        if engine.sequence_parallel_size > 1:
            raise ValueError(
                f"data_efficiency.data_routing.random_ltd: {engine.sequence_parallel_size} ranks share a sequence "
                "(sequence_parallel_size), and each has other tokens of it, so that no rank can choose among all and "
                "the ranks would keep unequal parts. Turn random_ltd off, or give each rank whole sequences"
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
                "the model was converted to random-LTD, which the configuration does not turn on: set enabled of "
                "data_efficiency, data_routing and random_ltd to true, or leave convert_to_random_ltd out"
            )
        if isinstance(engine.module, PipelineModule):
            raise ValueError(
                "random-LTD in a pipeline is refused: a stage knows its own layers alone, and recomputes micro-batches "
                "after it has begun others. Use ZeRO without a pipeline"
            )
        ranks = engine.parallel.data_rank, engine.parallel.data_world_size
        seed = engine.data_efficiency_config()["seed"]
        plan = TokenDropping(self.random_ltd_scheduler, engine.random_ltd_config(), seed, *ranks)
        plan.take(TokenDroppingForward.of(engine.module))
        self._plan = plan

    def see_inputs(self, inputs, kwargs):
        if self.random_ltd_scheduler is None or not self.engine.training:
            return
        self.random_ltd_scheduler.update_seq(self.engine.global_steps)
        if self._plan is None:
            warning_once("random_ltd is enabled, and no layer drops tokens: call convert_to_random_ltd(engine, class).")
            return
        self._plan.step, self._plan.micro_step = self.engine.global_steps, self.engine._steps.micro_steps

    def layer_tokens(self):
        """The tokens of all layers, those of the step under way included; None while random-LTD is off."""
        return None if self.random_ltd_scheduler is None else self.random_ltd_scheduler.consumed_layer_tokens

    def _lengths(self):
        """``(tokens of a sample, [those that each layer has got])`` in the last micro-batch; ``(None, [])`` where no
        layer has told."""
        lengths = self._plan.lengths if self._plan is not None else {}
        if not lengths:
            return None, []
        whole = max(length for length, _ in lengths.values())
        layers = range(self.random_ltd_scheduler.model_layer_num)
        return whole, [lengths.get(layer, (whole, whole))[1] for layer in layers]

    def effective_tokens(self, tokens):
        whole, lengths = self._lengths()
        return tokens if whole is None else tokens * sum(lengths) / (whole * len(lengths))

    @member
    def data_efficiency_report(self):
        """Lengths of the last micro-batch and sums over all steps up to now, as a dict; unknown values are None.

        ``step``: steps done. ``sequence_length``: tokens of a sample, after a curriculum. ``layer_lengths``: the tokens
        of a sample that each layer has got, by its number. ``effective_length``: their mean over the layers.
        ``kept_tokens``: what the schedule of random-LTD says. ``consumed_tokens``: the sum of effective lengths over
        samples, ranks and steps. ``consumed_layer_tokens``: the same times the layers, by the schedule alone.
        ``layers_left_out`` by progressive layer dropping in that micro-batch, and ``layer_probability`` of being kept.
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
        """Of a checkpoint at step ``engine.global_steps``, whose ``state`` is None where random-LTD was off."""
        scheduler = self.random_ltd_scheduler
        if scheduler is None:
            return
        scheduler.reset_to_init()
        steps = self.engine.global_steps
        known = {"consumed_layer_tokens": 0, "curr_step": steps - 1, "current_value": scheduler.get_value(steps)}
        scheduler.load_state_dict({**known, **(state or {})})
