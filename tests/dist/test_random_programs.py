"""Random training programs: parameters are those of plain PyTorch in the same program, whatever it does in between.

`make test` runs 100 programs, `make test-all` 2,000. What fails is shrunk, and printed as a row for SHRUNK.
"""

import pprint

import pytest

import devices
from harness import RankError, RankTimeout, run_ranks
from random_programs import ProgramFailed, program_of, program_with_copies, run_programs, shrunk
from sampling import every_case

pytestmark = pytest.mark.any_device
PART = 25
COUNT = 2000 if every_case() else 100

# Programs that have failed once, shortened: {what was wrong: (configuration, operations)}.
PLAINEST = {
    "stage": 3,
    "world": 1,
    "dtype": "fp32",
    "offload": None,
    "optimizer": "SGD",
    "accumulate": 1,
    "clip": 0.0,
    "persist": 100000,
    "plain_backward": False,
}
FOUR = {**PLAINEST, "world": 4}
SHRUNK = {
    "seed 9: persistent parameters went on with the user's tensors": (PLAINEST, [("vector", 462), ("train", 892)]),
    "seed 25: the same with param.data": ({**PLAINEST, "optimizer": "AdamW"}, [("data", 74), ("train", 576)]),
    "seed 24: load_state_dict of children undid that of the root": (
        {**PLAINEST, "persist": 0},
        [("load", 784), ("train", 478)],
    ),
    "seed 41: another engine forgot what was written": (PLAINEST, [("unasked", 568), ("again", 126), ("train", 147)]),
    "seed 193: a slice undid a write through param.data": (PLAINEST, [("behind", 766), ("slice", 673)]),
    "seed 250: a gathered write undid a slice": (PLAINEST, [("inside", 586), ("slice", 765)]),
    "seed 250: a rank that was ahead wrote its slice": (
        {**PLAINEST, "world": 2, "optimizer": "AdamW"},
        [("evaluate", 914), ("slice", 765), ("train", 693)],
    ),
    "seed 38: a gathered write undid a write in place": (PLAINEST, [("write", 149), ("write", 256), ("train", 131)]),
    "a rank without elements went on with the user's tensor": (FOUR, [("vector", 326), ("train", 4), ("train", 5)]),
    "a second copy that followed forgot what was written": (
        {**FOUR, "copies": "hpZ"},
        [("inside", 596), ("slice", 50)],
    ),
    "exact values undid a write": (
        {**FOUR, "copies": "hpZ", "persist": 0},
        [("inside", 526), ("rank0", 381), ("evaluate", 1)],
    ),
    "a second copy was read that was old": ({**FOUR, "copies": "both"}, [("data", 96), ("train", 4), ("train", 5)]),
}


def failures_of(programs, folder):
    """``[(program, text)]``, world by world; ranks of a program that failed begin anew with the next."""
    found = []
    for world in sorted({made["world"] for made, _ in programs}):
        left = [program for program in programs if program[0]["world"] == world]
        while left:
            try:
                told = run_ranks(world, run_programs, left, str(folder), init=True, timeout=240, grace=3.0)[0]
            except ProgramFailed as error:
                told = [error.args]
            except (RankError, RankTimeout) as error:  # whose it is nobody knows
                if len(left) > 1:
                    return found + [one for program in left for one in failures_of([program], folder)]
                told = [(0, str(error))]
            found += [(left[number], text) for number, text in told]
            left = left[told[-1][0] + 1 :] if told and world > 1 else []
    return found


@pytest.mark.any_device("list")
@pytest.mark.parametrize("part", range(COUNT // PART))
def test_programs(part, tmp_path):
    seeds = range(part * PART, (part + 1) * PART)
    failures = failures_of([program_of(seed) for seed in seeds], tmp_path)
    if failures:
        program, text = failures[0]
        short = shrunk(program, lambda shorter: bool(failures_of([shorter], tmp_path)))
        seed = next(seed for seed in seeds if program_of(seed) == program)
        pytest.fail(f"{len(failures)} of {PART} programs fail. Seed {seed}: {text}\n{pprint.pformat(short, width=110)}")


# Ranks read each other's slices in shared memory here. On devices a written slice of a parameter that stays gathered is
# seen after the next step (docs/tutorials/zero-access.md).
ON_THE_HOST = {"seed 250: a rank that was ahead wrote its slice"}


@pytest.mark.parametrize("name", [name for name in SHRUNK if devices.NAME == "cpu" or name not in ON_THE_HOST])
def test_programs_that_have_failed(name, tmp_path):
    assert failures_of([SHRUNK[name]], tmp_path) == []


@pytest.mark.any_device("list")
def test_programs_with_copies(tmp_path):
    programs = [program_with_copies(seed) for seed in range(300 if every_case() else 18)]
    if devices.NAME != "cpu":  # as ON_THE_HOST
        programs = [(made, [one for one in todo if one[0] != "slice"]) for made, todo in programs]
    assert failures_of(programs, tmp_path) == []


def test_a_failing_program_is_shortened():
    first = {**PLAINEST, "plain_backward": True, "clip": 0.2, "accumulate": 2, "dtype": "bf16", "world": 2}
    program = (first, [("train", n) for n in range(8)] + [("save", 1)] + [("load", 2)] * 3)
    made, operations = shrunk(program, lambda p: ("save", 1) in p[1] and p[0]["dtype"] == "bf16")
    assert operations == [("save", 1)] and made["dtype"] == "bf16"
    assert (made["world"], made["accumulate"], made["clip"]) == (1, 1, 0.0)
