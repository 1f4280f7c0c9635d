"""Large matrices of cases: `make test` runs a fixed sample of each, `make test-all` runs every case.

    @pytest.mark.sample                    # each pair of values of two parameters appears in some case
    @pytest.mark.sample("values")          # each value of each parameter appears in some case
    @pytest.mark.sample("values", 12)      # and at least 12 cases
    @pytest.mark.parametrize("world", [1, 2, 3])
    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_training(stage, world): ...

What is chosen depends on the names and positions of the parameters' values alone, never on chance or on the machine, so
that a case which failed once is there the next time. A case that is named on the command line runs in any event.
Loops inside a test choose with `sample` and ask `every_case()` what was wanted.
"""

import functools
import hashlib
import itertools
import os
import re

PLAIN = (str, bytes, int, float, tuple, list, dict, set, frozenset)
VARIABLE = "DS_TEST_EVERY_CASE"  # `make test-all` sets it; C++ tests read it, too
COVER = "DS_TEST_COVER"  # "values": samples no larger than that; `tools/test.sh second` sets it for the second torch
BRIEF = "brief"  # its value for one test case in ``ONE_IN`` of all files; `tools/test.sh brief` sets it
ONE_OF_A_FILE = "file"  # its value where one case of each file is enough; tests/device/checklist.py --sample sets it


def every_case():
    """Whether every case is to run, not a sample."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def second_torch():
    """Whether all tests have passed on this tree with another torch: only those that meet torch are left."""
    return os.environ.get(COVER) in ("values", BRIEF)


# A file whose tests ask for a torch or for a package that stands beside torch 2, or whose subject is an interface of
# torch: process groups, hooks of autograd, compilation, torch's archives, and clients.
ASKS_FOR_TORCH = re.compile(
    r"TORCH2|importorskip|skipif\(\s*[^\n]*(torch|fp16|HALF_ON_CPU|standin)"
    r"|hasattr\(torch|torch\.__version__(\.split| >=)"
)
SUBJECT_IS_TORCH = re.compile(r"/(comm|activation_checkpointing)/|test_comm_|transformers|compile|hooks|archive|parity")


ONE_IN = 12


@functools.lru_cache(maxsize=None)
def meets_torch(path):
    """Whether all tests of the file run on each torch. Of other files one in ``ONE_IN`` runs on the second torch."""
    with open(path, encoding="utf-8") as file:
        return bool(SUBJECT_IS_TORCH.search(path) or ASKS_FOR_TORCH.search(file.read()))


def only_on_first_torch(path, case):
    """Whether the second torch leaves out a test case."""
    brief = os.environ.get(COVER) == BRIEF
    if brief and re.search(r"standin|checklist", os.path.basename(path)):
        return True  # they need libraries that are built with the C++ tests
    if not second_torch() or hashlib.sha256(case.encode()).digest()[0] % ONE_IN == 0:
        return False
    return brief or not meets_torch(path)


def _parts(case, strength):
    """The values of the case, or its pairs of values, each with its position."""
    return {*itertools.combinations(enumerate(case), min(strength, len(case)))}


def sample(cases, cover="pairs", at_least=0, seed=""):
    """Indices, in order, of cases that hold together each pair of values (`cover="values"`: each value) that occurs.

    cases: a sequence of equally long tuples of hashable values. Greedy: always the case that adds most; between equals
    a hash of its values decides, so that samples of similar matrices are not all from the same corner.
    """
    if cover not in ("pairs", "values"):
        raise ValueError(f"a sample covers 'pairs' or 'values', not {cover!r}")
    if second_torch():
        cover, at_least = "values", 0
    strength = 2 if cover == "pairs" else 1
    parts = [_parts(case, strength) for case in cases]
    ranks = [hashlib.sha256(f"{seed}{case!r}".encode()).digest() for case in cases]
    left, chosen, missing = set(range(len(cases))), [], set().union(*parts)
    while left and (missing or len(chosen) < at_least):
        best = min(left, key=lambda index: (-len(parts[index] & missing), ranks[index]))
        left.remove(best)
        chosen.append(best)
        missing -= parts[best]
    return sorted(chosen)


def _one_of_each_file(items):
    """One of each file of the pytest items for any device, with at most two ranks if there is one. One that may be
    skipped only where the file has no other; those marked `any_device("list")` are too large to be taken."""
    best = {}
    for item in items:
        mark = item.get_closest_marker("any_device")
        if mark is None or mark.args:
            continue
        may_skip = any(item.get_closest_marker(name) for name in ("skip", "skipif", "every"))
        many = hasattr(item, "callspec") and item.callspec.params.get("world", 1) not in (1, 2)
        rank = (may_skip, many, hashlib.sha256(item.nodeid.encode()).digest())
        path = str(item.path)
        if path not in best or rank < best[path][0]:
            best[path] = (rank, item)
    return {item for _, item in best.values()}


def _positions(values):
    """For each value the number of the first that is the same; any object may be a parameter, hashable or not."""
    known = []
    for value in values:
        for index, other in enumerate(known):  # noqa: B007
            if value is other or (type(value) is type(other) and isinstance(value, PLAIN) and value == other):
                break
        else:
            index = len(known)
            known.append(value)
        yield index


def left_out(items):
    """The collected pytest items that a `sample` mark leaves to `make test-all`, or all but one of each file."""
    if os.environ.get(COVER) == ONE_OF_A_FILE:
        kept = _one_of_each_file(items)
        return [item for item in items if item not in kept]
    matrices = {}
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is not None and hasattr(item, "callspec"):
            matrices.setdefault(item.nodeid.split("[")[0], (mark, []))[1].append(item)
    dropped = []
    for name, (mark, cases) in matrices.items():
        axes = sorted(cases[0].callspec.params)
        columns = [_positions([case.callspec.params[axis] for case in cases]) for axis in axes]
        positions = list(zip(*columns))
        kept = set(sample(positions, *mark.args, seed=name, **mark.kwargs))
        dropped += [case for index, case in enumerate(cases) if index not in kept]
    return dropped
