"""The channel between the stages of a pipeline, and communicators over its copies, stages and slices."""

from deepspeed import comm as dist
from deepspeed.comm import held
from deepspeed.comm.mesh_views import SAME_WEIGHTS, Purpose
from deepspeed.engine.members import pipeline_parts
from deepspeed.pipe.layers import describe
from deepspeed.pipe.ranks import NoChannel
from deepspeed.pipe.slices import ACTIVATIONS, GRADS, Slices


@pipeline_parts.add("_links")
class Links:
    """A part of a pipeline's engine. ``copies``, ``stages`` and ``slices`` are None where there is one of them."""

    engine_attributes = ("channel",)

    def __init__(self, engine):
        self.engine = engine
        self.channel = NoChannel()
        self.copies = self.stages = self.slices = None
        self.tied = {}

    def meet(self):
        """Once this engine knows its stage. All members ask in one order."""
        engine, ranks = self.engine, self.engine.parallel
        self.channel = ranks.channel(engine.device, engine.module.pipe_shape) or NoChannel()
        opened = ranks.mesh.communicator
        self.copies = opened(SAME_WEIGHTS, Purpose.CONTROL) if ranks.dp_world_size > 1 else None
        self.stages = opened(["pp"], Purpose.CONTROL) if engine.is_pipe_parallel else None
        self.tied = {key: ranks.over(tied["ranks"]) for key, tied in engine.module.tied_comms.items()}
        section, cut = engine._config.pipeline, set()
        if engine.is_model_parallel and engine.is_pipe_parallel:
            cut = {ACTIVATIONS} if section["pipe_partitioned"] else set()
            cut |= {GRADS} if section["grad_partitioned"] else set()
        self.slices = Slices(ranks.over(engine.grid.slice_group), cut) if cut else None
        groups = [one for one in (self.copies, self.stages, *self.tied.values()) if one is not None]
        groups += [] if self.slices is None else [self.slices.communicator]
        core = [] if engine.core is None else held.held_by(engine.core)
        layers = [describe(number, layer) for number, layer in enumerate(engine.module._layer_specs)]
        instructions = engine._failures.number_instructions()
        engine.error_propagation = ranks.error_propagation(self.channel, groups + core, instructions, layers)
        if engine.error_propagation is not None:
            engine.module.position.share(engine.error_propagation.position)

    def from_first(self, objects):
        """Stages of one copy hear of its first stage, copies of stages of the first copy: all have the same then."""
        engine = self.engine
        if self.copies is not None and engine.is_first_stage():
            group = engine.parallel.dp_group
            dist.broadcast_object_list(objects, dist.get_global_rank(group, 0), group=group)
        if engine.is_pipe_parallel:
            group = engine.grid.get_pipe_parallel_group()
            dist.broadcast_object_list(objects, engine.grid.stage_to_global(0), group=group)
