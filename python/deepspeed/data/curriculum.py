"""The difficulty of each step of a curriculum."""

import math

SCHEDULES = ("fixed_linear", "fixed_root", "fixed_discrete", "custom")
_SETTINGS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


class CurriculumScheduler:
    """The difficulty that a step may have at most, which grows from ``min_difficulty`` to ``max_difficulty``.

    config: mapping with the keys of a curriculum: ``min_difficulty``, ``max_difficulty``, ``schedule_type`` and
    ``schedule_config``. The types are

    - ``fixed_linear``, ``fixed_root``: (step / total_curriculum_step) ^ (1 / root_degree) of the way from minimum to
      maximum (linear: degree 1), rounded down to a whole number and to a multiple of ``difficulty_step``, and at most
      the maximum.
    - ``fixed_discrete``: ``difficulty[i]`` up to and including step ``max_step[i]``, the last one from then on.
    - ``custom``: the value of the function of ``set_custom_get_difficulty``.

    ``state`` is what ``get_state`` returns: the settings and ``current_difficulty``, plain values.
    Bad settings raise ValueError with the name of the key.
    """

    def __init__(self, config):
        for key in ("min_difficulty", "max_difficulty", "schedule_type"):
            if config.get(key) is None:
                raise ValueError(f"a curriculum needs {key!r}, and the configuration has none.")
        low, high, kind = config["min_difficulty"], config["max_difficulty"], config["schedule_type"]
        if low > high:
            raise ValueError(
                f"min_difficulty {low} is above max_difficulty {high}: a curriculum goes from easy to hard. "
                "Make max_difficulty at least min_difficulty."
            )
        if kind not in SCHEDULES:
            raise ValueError(f"schedule_type {kind!r} is not one of {', '.join(SCHEDULES)}.")
        self.state = {
            "min_difficulty": low,
            "max_difficulty": high,
            "current_difficulty": low,
            "schedule_type": kind,
            "schedule_config": _checked_settings(kind, config.get("schedule_config") or {}, high),
        }
        self.custom_get_difficulty = None

    def get_current_difficulty(self):
        return self.state["current_difficulty"]

    def set_current_difficulty(self, difficulty):
        self.state["current_difficulty"] = difficulty

    def set_custom_get_difficulty(self, schedule_function):
        """``schedule_function(global_steps)`` returns the difficulty of a step; for ``schedule_type`` "custom"."""
        self.custom_get_difficulty = schedule_function

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state

    def get_difficulty(self, global_steps):
        """The difficulty of a step by the schedule alone, which does not change ``current_difficulty``."""
        kind, settings = self.state["schedule_type"], self.state["schedule_config"]
        if kind == "custom":
            if self.custom_get_difficulty is None:
                raise RuntimeError(
                    "schedule_type is 'custom', and no function gives the difficulty: call "
                    "engine.set_custom_curriculum_learning_schedule, or set_custom_get_difficulty of the scheduler."
                )
            return self.custom_get_difficulty(global_steps)
        if kind == "fixed_discrete":
            for difficulty, last in zip(settings["difficulty"], settings["max_step"]):
                if global_steps <= last:
                    return difficulty
            return settings["difficulty"][-1]
        low, high = self.state["min_difficulty"], self.state["max_difficulty"]
        degree = settings["root_degree"] if kind == "fixed_root" else 1
        share = (float(global_steps) / settings["total_curriculum_step"]) ** (1.0 / degree)
        difficulty = math.floor(share * (high - low) + low)
        return min(difficulty - difficulty % settings["difficulty_step"], high)

    def update_difficulty(self, global_steps):
        """Makes the difficulty of a step the current one and returns it. The maximum, once reached, is kept."""
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.state["current_difficulty"]


def _checked_settings(kind, given, high):
    """The settings of one type of schedule as plain values; ValueError where they give no difficulty."""
    settings = {}
    for key in _SETTINGS[kind]:
        value = given.get(key)
        if value is None:
            raise ValueError(f"schedule_config.{key} is missing: schedule_type {kind!r} needs it.")
        settings[key] = list(value) if isinstance(value, (list, tuple)) else value
    for key in ("total_curriculum_step", "difficulty_step", "root_degree"):
        if key in settings and settings[key] <= 0:
            raise ValueError(f"schedule_config.{key} is {settings[key]}: it must be above 0.")
    if "difficulty_step" in settings and settings["difficulty_step"] > high:
        raise ValueError(
            f"schedule_config.difficulty_step {settings['difficulty_step']} is above max_difficulty {high}: no "
            "multiple of it is a difficulty. Make it smaller."
        )
    if kind == "fixed_discrete":
        levels, steps = settings["difficulty"], settings["max_step"]
        if len(levels) != len(steps) + 1:
            raise ValueError(
                f"schedule_config.max_step has {len(steps)} items and schedule_config.difficulty {len(levels)}: "
                "max_step is one shorter, because the last difficulty has no end."
            )
        if steps != sorted(steps):
            raise ValueError(f"schedule_config.max_step {steps} does not grow: each item ends its difficulty.")
    return settings
