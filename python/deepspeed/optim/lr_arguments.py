"""Names of the schedules and their parameters, and a schedule given on a script's command line.

``add_tuning_arguments`` adds one argument per parameter; ``get_config_from_args`` turns the parsed result into the
``scheduler`` section of a configuration.
"""

import inspect

from deepspeed.optim.lr_schedules import (
    WARMUP_LINEAR_RATE,
    WARMUP_LOG_RATE,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"

CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
DECAY_LR_RATE = "decay_lr_rate"
CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MOMENTUM = "cycle_momentum"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MAX_MOM = "cycle_max_mom"
DECAY_MOM_RATE = "decay_mom_rate"

WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"


def _flag(text):
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise ValueError(f"{text!r} is neither true nor false")
    return values[text.lower()]


_WARMUP = {WARMUP_NUM_STEPS: int, WARMUP_TYPE: str}
_PARAMETERS = {
    LR_RANGE_TEST: {
        LR_RANGE_TEST_MIN_LR: float,
        LR_RANGE_TEST_STEP_SIZE: int,
        LR_RANGE_TEST_STEP_RATE: float,
        LR_RANGE_TEST_STAIRCASE: _flag,
    },
    ONE_CYCLE: {
        CYCLE_MIN_LR: float,
        CYCLE_MAX_LR: float,
        DECAY_LR_RATE: float,
        CYCLE_FIRST_STEP_SIZE: int,
        CYCLE_SECOND_STEP_SIZE: int,
        CYCLE_FIRST_STAIR_COUNT: int,
        CYCLE_SECOND_STAIR_COUNT: int,
        DECAY_STEP_SIZE: int,
        CYCLE_MOMENTUM: _flag,
        CYCLE_MIN_MOM: float,
        CYCLE_MAX_MOM: float,
        DECAY_MOM_RATE: float,
    },
    WARMUP_LR: {WARMUP_MIN_LR: float, WARMUP_MAX_LR: float, **_WARMUP},
    WARMUP_DECAY_LR: {TOTAL_NUM_STEPS: int, WARMUP_MIN_LR: float, WARMUP_MAX_LR: float, **_WARMUP},
    WARMUP_COSINE_LR: {TOTAL_NUM_STEPS: int, WARMUP_MIN_RATIO: float, COS_MIN_RATIO: float, **_WARMUP},
}
_CLASSES = {
    LR_RANGE_TEST: LRRangeTest,
    ONE_CYCLE: OneCycle,
    WARMUP_LR: WarmupLR,
    WARMUP_DECAY_LR: WarmupDecayLR,
    WARMUP_COSINE_LR: WarmupCosineLR,
}
# Where the classes have no default, or not the same one: a script with only --lr_schedule OneCycle still runs.
_COMMAND_LINE_DEFAULTS = {CYCLE_MIN_LR: 0.01, CYCLE_MAX_LR: 0.1, WARMUP_MAX_LR: 0.001, TOTAL_NUM_STEPS: None}


def _default(schedule, name):
    if name in _COMMAND_LINE_DEFAULTS:
        return _COMMAND_LINE_DEFAULTS[name]
    return inspect.signature(_CLASSES[schedule]).parameters[name].default


def add_tuning_arguments(parser):
    """Adds ``--lr_schedule`` and one argument per schedule parameter to an argparse parser; returns the parser.

    Parameters that are not given have the default of the schedule's class.
    """
    group = parser.add_argument_group("Convergence tuning", "learning-rate schedule and its parameters")
    group.add_argument("--" + LR_SCHEDULE, type=str, default=None, help=f"one of {', '.join(VALID_LR_SCHEDULES)}")
    users = {}
    for schedule, parameters in _PARAMETERS.items():
        for name, kind in parameters.items():
            users.setdefault(name, (kind, []))[1].append(schedule)
    for name, (kind, schedules) in users.items():
        extra = {"nargs": "?", "const": True} if kind is _flag else {}
        if name == WARMUP_TYPE:
            extra["choices"] = [WARMUP_LOG_RATE, WARMUP_LINEAR_RATE]
        group.add_argument(
            "--" + name,
            type=kind,
            default=_default(schedules[0], name),
            help=f"parameter of {', '.join(schedules)}",
            **extra,
        )
    return parser


def get_config_from_args(args):
    """``({"type": ..., "params": {...}}, None)`` from parsed arguments, or ``(None, reason)``."""
    schedule = getattr(args, LR_SCHEDULE, None)
    if schedule is None:
        return None, f"--{LR_SCHEDULE} not specified on command line"
    if schedule not in VALID_LR_SCHEDULES:
        return None, f"{schedule} is not a known LR schedule; use one of {', '.join(VALID_LR_SCHEDULES)}"
    given = {name: getattr(args, name, None) for name in _PARAMETERS[schedule]}
    params = {name: value for name, value in given.items() if value is not None}
    return {"type": schedule, "params": params}, None


def get_lr_from_config(config):
    """``(rate, "")``: the rate that stands for a ``scheduler`` section, the largest of a cycle or warm-up and the
    smallest of a range test; or ``(None, reason)``."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    schedule, params = config["type"], config["params"]
    if schedule not in VALID_LR_SCHEDULES:
        return None, f"{schedule} is not a known LR schedule; use one of {', '.join(VALID_LR_SCHEDULES)}"
    key = {LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR, ONE_CYCLE: CYCLE_MAX_LR}.get(schedule, WARMUP_MAX_LR)
    if key not in params:
        return None, f"{key} of {schedule} not defined in config"
    return params[key], ""
