"""Progressive layer dropping: chooses the layers that a step leaves out, and tells the core about them."""

import collections
import inspect

from deepspeed import _native
from deepspeed.data.layer_drop import DroppableForward, LayerDropping, ProgressiveLayerDrop
from deepspeed.engine.members import Part, engine_parts, member
from deepspeed.pipe.module import PipelineModule
from deepspeed.zero.parameters.sharded_parameter import is_sharded


@engine_parts.add("_layer_dropping")
class LayerDroppingPart(Part):
    """A part of the engine. It does nothing while progressive layer dropping is off."""

    engine_attributes = ("progressive_layer_drop",)
    progressive_layer_drop = None  # while it is off
    _plan = None
    _takes_keywords = None  # whether the model's forward takes them; None until it is first needed
    _left_out = False  # whether the core leaves out parameters now

    def __init__(self, engine):
        super().__init__(engine)
        if engine.pld_enabled():
            self.progressive_layer_drop = ProgressiveLayerDrop(engine.pld_theta(), engine.pld_gamma())

    @member
    def get_pld_theta(self):
        """The probability with which progressive layer dropping kept a layer in the last forward that trains, 1.0
        before the first one. None if it is off."""
        return None if self.progressive_layer_drop is None else self.progressive_layer_drop.get_theta()

    def start(self):
        forwards = DroppableForward.released(self.engine.module)  # by an earlier engine
        if self.progressive_layer_drop is not None and forwards:
            self.take()

    def take(self):
        """From now on, steps may leave out the layers that ``convert_to_pld`` has converted."""
        engine = self.engine
        if self.progressive_layer_drop is None:
            raise ValueError(
                "the model was converted to progressive layer dropping, and the configuration does not enable it: set "
                "progressive_layer_drop.enabled to true, or do not call convert_to_pld"
            )
        if isinstance(engine.module, PipelineModule):
            raise ValueError(
                "progressive layer dropping does not work in a pipeline: stages that leave out unequal numbers of "
                "layers would wait for each other, and a stage recomputes micro-batches after it has begun others. Use "
                "ZeRO without a pipeline"
            )
        if not engine.zero_ignore_unused_parameters():
            raise ValueError(
                "zero_optimization.ignore_unused_parameters is false, which forbids steps in which a parameter has no "
                "gradient, and layers that are left out have none. Remove that key, or set "
                "progressive_layer_drop.enabled to false"
            )
        forwards = DroppableForward.of(engine.module)
        self._plan = LayerDropping(forwards, engine.data_efficiency_config()["seed"])
        self._params = _of_each([forward.layer for forward in forwards.values()], engine.module)
        trained = [param for group in engine.trained_groups for param in group]
        self._numbers = {id(param): number for number, param in enumerate(trained)}

    def dropped(self):
        """The numbers of the layers that the last forward has left out."""
        return sorted(self._plan.dropped) if self._plan is not None else []

    def dropped_layers(self):
        """The layers themselves, a set of modules."""
        forwards = self._plan.forwards.values() if self._plan is not None else ()
        return {forward.layer for forward in forwards if forward.number in self._plan.dropped}

    def add_keywords(self, kwargs):
        drop = self.progressive_layer_drop
        if drop is None or not self.engine.training:
            return
        drop.update_state(self.engine.global_steps)
        if self._plan is None:
            self._need_keywords(drop.get_state())
            kwargs.update(drop.get_state())

    def see_inputs(self, inputs, kwargs):
        engine = self.engine
        if self._plan is not None:
            probability = engine.get_pld_theta() if engine.training else 1.0
            self._plan.place(engine.global_steps, engine._window.index, probability)
            self._leave_out(self._plan.dropped)

    def after_micro_step(self, boundary):
        if self._left_out:
            self._leave_out(())

    def before_step(self):
        if self.progressive_layer_drop is not None:
            self.progressive_layer_drop.update_state(self.engine.global_steps)

    def after_load(self):
        if self.progressive_layer_drop is not None:
            self.progressive_layer_drop.update_state(max(0, self.engine.global_steps - 1))

    def _need_keywords(self, keywords):
        if self._takes_keywords is None:
            params = inspect.signature(self.engine.module.forward).parameters
            anything = any(one.kind is one.VAR_KEYWORD for one in params.values())
            self._takes_keywords = anything or keywords.keys() <= params.keys()
        if not self._takes_keywords:
            raise ValueError(
                f"progressive_layer_drop.enabled: {type(self.engine.module).__name__}.forward does not take the "
                f"keywords {', '.join(keywords)}, with which a model drops layers by itself. Let the engine drop them: "
                "call deepspeed.runtime.progressive_layer_drop.convert_to_pld(engine, class of the layers)"
            )

    def _leave_out(self, layers):
        params = [param for layer in sorted(layers) for param in self._params[layer]]
        trained = [self._numbers[id(param)] for param in params if id(param) in self._numbers]
        self._left_out = bool(params)
        _native._C.leave_out(self.engine.core, trained, [param.ds_handle for param in params if is_sharded(param)])


def _of_each(layers, model):
    """For each layer, the parameters that no module outside of it has."""
    owners = collections.defaultdict(set)
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners[id(param)].add(module)
    inside = [set(layer.modules()) for layer in layers]
    return [[param for param in layer.parameters() if owners[id(param)] <= own] for layer, own in zip(layers, inside)]
