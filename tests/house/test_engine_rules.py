"""Rules of the training core, on this tree and on made-up ones, each of which breaks a rule once."""

import ast
import types

import pytest

import house_engine
from sentences import only


def made_up(path, text):
    return {path: types.SimpleNamespace(path=path, room=path.split("/")[0], tree=ast.parse(text))}


@pytest.mark.parametrize(
    "line",
    [
        "if (options.stage == 3) f();",
        "return policy_->stage>=2;",
        "while (0 < zero_stage) {}",
        "bool b = engine.stage() != 1;",
        "switch (options.stage) {}",
        "bool b = 2 <= options.stage;",
    ],
)
def test_a_stage_number_in_cpp(line):
    only(
        house_engine.check_stage_numbers_cpp({"zero/a.cpp": "\n" + line, "config/a.cpp": line}),
        "csrc/zero/a.cpp:2 compares",
    )


@pytest.mark.parametrize("line", ["stage_policy(3);", "// stage == 3;", "bool b = p.stage == stage;", "a << stage;"])
def test_what_is_no_stage_number_in_cpp(line):
    assert house_engine.check_stage_numbers_cpp({"zero/a.cpp": line}) == []


@pytest.mark.parametrize(
    "line",
    [
        "if engine.zero_optimization_stage() == 3: pass",
        "x = 2 <= self.stage",
        "x = stage in (1, 2)",
        "x = 0 < int(config.zero_stage)",
        "match stage:\n    case 3: pass",
    ],
)
def test_a_stage_number_in_python(line):
    only(house_engine.check_stage_numbers_python(made_up("engine/a.py", "\n" + line)), "engine/a.py:2 ")
    assert house_engine.check_stage_numbers_python(made_up("config/a.py", line)) == []


@pytest.mark.parametrize("line", ["stage = 2 if shards else 1", "same = run.stage == engine.stage", "x = stages == 3"])
def test_what_is_no_stage_number_in_python(line):
    assert house_engine.check_stage_numbers_python(made_up("engine/a.py", line)) == []


def test_a_wide_binding():
    arguments = ", ".join(f'py::arg("a{i}")' for i in range(9))
    wide = (f'm.def("f", &f, {arguments});', "binds f"), (f"x.def(py::init(&g), {arguments});", "__init__")
    for text, name in wide:
        only(
            house_engine.check_binding_arguments({"bindings/a.cpp": "\n" + text, "zero/a.cpp": text}),
            "csrc/bindings/a.cpp:2 ",
            name,
        )
    narrow = f'm.def("f", &f, {arguments.rsplit(",", 1)[0]}).def("g", &g, py::arg("x"));'
    assert house_engine.check_binding_arguments({"bindings/a.cpp": narrow}) == []


@pytest.mark.parametrize(
    "line",
    [
        'int64_t n = key_or<int64_t>(config, "a.b", 4);',
        'bool b = config.find("a.b").value_or(true);',
        "double d = value->is_null() ? 1.0 : value->get<double>();",
        "auto f = [&](const char* name, int64_t fallback) {};",
        'placement.pinned = key<bool>(config, section + "pin_memory", true);',
    ],
)
def test_a_default_beside_its_field(line):
    only(
        house_engine.check_option_defaults({"zero/engine_options.cpp": "\n" + line, "zero/a.cpp": line}),
        "engine_options.cpp:2 holds a default",
    )
    fine = 'x = key<int>(config, zero + "stage");  // key_or'
    assert house_engine.check_option_defaults({"zero/engine_options.cpp": fine}) == []


@pytest.mark.parametrize("line", ["EngineOptions options;", "f(zero::EngineOptions{});", "EngineOptions o = f();"])
def test_options_made_elsewhere(line):
    only(
        house_engine.check_engine_options({"zero/a.cpp": "\n" + line, "zero/engine_options.cpp": line}),
        "csrc/zero/a.cpp:2 makes",
    )
    assert house_engine.check_engine_options({"zero/a.cpp": "f(const EngineOptions& x); // EngineOptions x;"}) == []


@pytest.mark.parametrize(
    "line",
    [
        "x = engine.module",
        "x = self.engine.anything",
        "x = run.global_rank",
        "x = other._config",
        "x = other._steps.count",
        "x = other._stage_policy",
        "x = run.module",
        "x = run.core.pieces()",
        "x = run.stepping.names",
        "x = run.optimizer",
    ],
)
def test_an_engine_under_checkpoint(modules, line):
    kept = ("engine/engine.py", "engine/accessors.py", "engine/parts/steps.py", "checkpoint/run_state.py")
    known = {name: module for name, module in modules.items() if module.path in kept}
    only(
        house_engine.check_checkpoint_without_engine({**known, **made_up("checkpoint/a.py", "\n" + line)}),
        "checkpoint/a.py:2 reads",
    )
    fine = made_up("checkpoint/a.py", "x = run.ranks.world_size + run.counters.global_steps, run.writer.save")
    assert house_engine.check_checkpoint_without_engine({**known, **fine}) == []
    assert house_engine.check_checkpoint_without_engine({**known, **made_up("engine/a.py", line)}) == []
