"""One forecast: which files may compute bytes of a model's states. Each check returns a list of sentences."""

import re

from sentences import listed

SEE = 'See "a forecast of a step" in docs/core.md, and STATE_BYTES in tests/house/house_bytes.py.'

# File, below python/deepspeed or csrc: why. Everything else asks the planner, which counts what the engine allocates.
STATE_BYTES = {
    "zero/offload/memory_estimators.py": "the published rules of thumb",
    "plan/memory_plan.": "as above",
    "bindings/plan/memory_plan.cpp": "as above",
    "plan/place_plan.": "the engine places states by their bytes",
    "zero/offload/auto_placements.": "as above",
    "zero/engine.cpp": "as above",
    "zero/states/named_states.py": "the bytes of states that exist, which a read copies",
    "zero/optimizers/flat_optimizer.py": "the bytes of a file that exists",
    "zero/gathers/gather_buffers.cpp": "the bytes of a buffer that is allocated",
    "comm/calls/op.cpp": "the bytes of a call",
    "profiling/op_costs.py": "operations of an operator",
    "pipe/planning.py": "published: pipe.plan(state_bytes=), by which the caller says them, and the report's field",
    "planner/parts.py": "as above: what the caller says, or what the engine has allocated",
    "plan/pipe_cost.": "as above, of the parts of a schedule",
    "bindings/plan/pipe.cpp": "as above",
}

# Bytes of an element times parameters, and names of what holds such products.
_BYTES = re.compile(
    r"\b(?:2|4|8|12|16|18|20) \* (?:[a-z_.]+(?:\[[^\]]*\])?[.(]+)*(?:numel|n?params?|parameters)\b"
    r"|\b(?:numel(?:\(\))?|n?params|parameters) \* (?:2|4|8|12|16|18|20)\b"
    r"|\b(?:\w*state_bytes|bytes_of_states|StateBytes|PlaceNeed|MemoryNeed|zero[23]_need|states_per_rank)\b"
)
_TEXTS = re.compile(r'"""(?:.|\n)*?"""|#[^\n]*|//[^\n]*')


def _found(files, root):
    for path, text in sorted(files.items()):
        if path.startswith(tuple(STATE_BYTES)):
            continue
        code = _TEXTS.sub(lambda found: "\n" * found.group().count("\n"), text)
        for number, line in enumerate(code.splitlines(), 1):
            for found in _BYTES.findall(line):
                yield (
                    f"{root}/{path}:{number} computes bytes of states ({found.strip()}): a forecast of its own has to "
                    f"learn each new feature of the engine, and is wrong until then. Ask deepspeed.plan, "
                    f"deepspeed.offload_plan or engine.plan(). {SEE}"
                )


@listed
def check_state_bytes_cpp(files):
    yield from _found(files, "csrc")


@listed
def check_state_bytes_python(modules):
    yield from _found({module.path: module.source for module in modules.values()}, "python/deepspeed")
