"""The curriculum over sequence length, the section ``curriculum_learning`` of the configuration."""

import inspect

from deepspeed._native import DeepSpeedConfigError
from deepspeed.data.curriculum import CurriculumScheduler
from deepspeed.data.truncation import checked_dimensions, truncated
from deepspeed.engine.members import Part, engine_parts
from deepspeed.log import log_dist
from deepspeed.pipe.module import PipelineModule

KEYWORD = "curriculum_seqlen"
_INSTEAD = (
    'let the loader cut the batches: "curriculum_learning": {"truncate": {"input_ids": 1}}, which names each tensor, '
    "or its position in the batch, and its dimension that counts tokens"
)


@engine_parts.add("_curriculum")
class SequenceCurriculum(Part):
    """A part of the engine. A step that trains has sequences of the length that belongs to its number, from 1 on: the
    model cuts them at the keyword ``curriculum_seqlen``, or the loader cuts what ``truncate`` names. In a pipeline
    without ``truncate`` the script cuts them; it reads the length from ``engine.curriculum_scheduler_legacy``.
    """

    engine_attributes = ("curriculum_scheduler_legacy",)
    curriculum_scheduler_legacy = None  # its current difficulty is the length in the step under way
    passes = False  # the keyword to the model
    dimensions = None  # to cut, of tensors by name or position

    def __init__(self, engine):
        super().__init__(engine)
        if not engine.curriculum_enabled_legacy():
            return
        section = engine.curriculum_params_legacy()
        try:
            if section["curriculum_type"] != "seqlen":
                raise ValueError("curriculum_type is missing: set it to 'seqlen', the only one there is")
            self.curriculum_scheduler_legacy = CurriculumScheduler(section)
            self.dimensions = checked_dimensions(section["truncate"] or {})
        except ValueError as error:
            raise DeepSpeedConfigError(f"curriculum_learning: {error}") from error

    def start(self):
        if self.curriculum_scheduler_legacy is None:
            return
        self._look_ahead()
        model = self.engine.module
        if isinstance(model, PipelineModule):
            if not self.dimensions:
                log_dist(
                    "curriculum_learning: in a pipeline nothing cuts the batches but your data iterator, by "
                    f"engine.curriculum_scheduler_legacy.get_current_difficulty(). Or {_INSTEAD}",
                    ranks=[0],
                )
            return
        named, any_name = _takes(model.forward)
        self.passes = named or any_name and not self.dimensions
        if self.dimensions:
            return
        if not self.passes:
            raise DeepSpeedConfigError(
                f"curriculum_learning: {type(model).__name__}.forward takes no keyword {KEYWORD}. Add it and cut the "
                f"sequences there, or {_INSTEAD}"
            )
        if self.engine.sequence_parallel_size > 1:
            raise DeepSpeedConfigError(
                f"curriculum_learning: {self.engine.sequence_parallel_size} ranks share each sequence, so a model "
                f"cannot cut its part at {KEYWORD}, which counts from the start of the whole. Instead, {_INSTEAD}"
            )

    @property
    def cuts_loaders(self):
        """Whether loaders cut; in a pipeline the engine does, whose data may come from elsewhere."""
        return bool(self.dimensions) and not isinstance(self.engine.module, PipelineModule)

    def _length(self):
        step = self.engine.global_steps + 1
        length = self.curriculum_scheduler_legacy.update_difficulty(step)
        if length < 1:
            raise DeepSpeedConfigError(
                f"curriculum_learning: the schedule gives sequences of {length} tokens at step {step}. Raise "
                "min_difficulty, which must be at least schedule_config.difficulty_step where there is one"
            )
        return length

    def _look_ahead(self):
        """The scheduler tells the length of the next step, if it can: a custom one is given its function later."""
        scheduler = self.curriculum_scheduler_legacy
        if scheduler.get_state()["schedule_type"] != "custom" or scheduler.custom_get_difficulty is not None:
            self._length()

    def add_keywords(self, kwargs):
        if self.passes and self.engine.module.training:
            kwargs[KEYWORD] = self._length()

    def cut(self, batch):
        """``batch`` of the training, as long as the step under way has it."""
        if not self.dimensions or not self.engine.module.training:
            return batch
        return truncated(batch, self.dimensions, self._length())

    def after_step(self):
        if self.curriculum_scheduler_legacy is not None:
            self._look_ahead()

    def after_load(self):
        """The length follows the number of the step alone, which may be an earlier one now."""
        scheduler = self.curriculum_scheduler_legacy
        if scheduler is not None:
            scheduler.set_current_difficulty(scheduler.get_state()["min_difficulty"])
            self._look_ahead()


def _takes(forward):
    """Whether a function takes the keyword by its name, and whether it takes any keyword."""
    try:
        parameters = inspect.signature(forward).parameters
    except (TypeError, ValueError):  # written in C
        return False, True
    return KEYWORD in parameters, any(one.kind is one.VAR_KEYWORD for one in parameters.values())
