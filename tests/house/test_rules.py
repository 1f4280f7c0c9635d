"""The checkers themselves, on made-up trees: each rule is broken once, and its message must name the place."""

import textwrap

import pytest

import house_bytes
import house_cpp
import house_devices
import house_names
import house_python
from sentences import only


@pytest.fixture
def package(tmp_path):
    def make(init="", **files):
        """package(ops__adam="...") writes ops/adam.py; empty __init__ files come by themselves, `init` is zero's."""
        files["zero__init"] = init
        for name, text in files.items():
            path = tmp_path.joinpath(*name.split("__")).with_suffix(".py")
            path = path.with_name("__init__.py") if path.stem == "init" else path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        for folder in {path.parent for path in tmp_path.rglob("*.py")}:
            (folder / "__init__.py").touch()
        return house_python.load(str(tmp_path))

    return make


# ---- arrows --------------------------------------------------------------------------------------------------------


def test_drawn_arrows_pass(package):
    modules = package(
        engine__engine="from deepspeed.zero.core import x\nfrom deepspeed import comm as dist\nimport deepspeed.log\n",
        zero__core="from . import helper\nfrom ..utils import groups\nimport torch\n",
        zero__helper="",
        utils__groups="from deepspeed import _native\n",
        comm__comm="", _native="", log="",
        runtime__engine="from deepspeed.engine.engine import x\n",
        launcher__runner="from deepspeed.log import logger\nfrom deepspeed.host import ports\n",
        host__ports="",
    )  # fmt: skip
    assert house_python.check_arrows(modules) == [] and house_python.check_cycles(modules) == []
    assert house_python.check_head_node(modules) == []


@pytest.mark.parametrize(
    "statement",
    [
        "from deepspeed.engine.engine import x",
        "import deepspeed.engine.engine",
        "from deepspeed.engine import engine",
        "from deepspeed import engine",
        "from ..engine import engine",
        "def f():\n    from deepspeed.engine import engine",
        "try:\n    import deepspeed.engine\nexcept ImportError:\n    pass",
    ],
)
def test_an_arrow_upwards(package, statement):
    modules = package(zero__core=statement, engine__engine="")
    only(house_python.check_arrows(modules), "zero/core.py:", "no arrow leads from 'zero' to 'engine'")


@pytest.mark.parametrize(
    "call",
    [
        "dist.new_group([0, 1])",
        "torch.distributed.new_group([0, 1], backend='gloo')",
        "new_group([0])",
        "dist.init_device_mesh('cpu', (2, 2))",
        "dist.distributed_c10d._new_process_group_helper(2, 0, [0, 1], 'gloo', store)",
    ],
)
def test_a_group_made_elsewhere(package, call):
    modules = package(moe__layer=f"def f():\n    return {call}\n")
    only(house_python.check_groups(modules), "moe/layer.py:2", "group_over")


def test_groups_made_in_their_place(package):
    modules = package(
        comm__mesh="def group_over(ranks):\n    return dist.new_group(ranks)\n",
        comm__torch="def new_group(ranks):\n    return mesh.new_group(ranks)\n",
        comm__process_group="def new_group(ranks):\n    return current_backend().new_group(ranks)\n",
    )
    assert house_python.check_groups(modules) == []


def test_a_name_that_becomes_a_path_by_itself(package):
    known = {"checkpoint/x.py": {"tag": "the caller's"}}
    for body in (
        "def f(folder, facts):\n    for name in facts['files']:\n        os.unlink(os.path.join(folder, name))\n",
        "def f(folder, facts):\n    return os.path.join(folder, LATEST, facts['module'])\n",
    ):
        modules = package(checkpoint__x=f"{body}\ndef g(folder, tag):\n    return os.path.join(folder, tag)\n")
        only(house_names.check_joined(modules, known), "checkpoint/x.py:", "path_below")
    modules = package(
        checkpoint__x="def f(folder, tag):\n    for root, _, names in os.walk(folder):\n        for name in names:\n"
        "            os.path.join(root, name)\n    return os.path.join(folder, tag, 'a', LATEST, names.run_states(3))\n"
    )
    assert house_names.check_joined(modules, known) == []
    only(house_names.check_joined(package(checkpoint__x=""), known), "no longer joins tag")
    only(house_names.check_joined_cpp({"io/x.cpp": 'open(folder + "/" + name)'}, {}), "csrc/io/x.cpp", "path_below")
    only(house_names.check_joined_cpp({}, {"io/x.cpp": "why"}), "no longer makes paths")


def test_rooms_of_one_floor_do_not_meet(package):
    modules = package(config__read="from deepspeed.accelerator import cpu", accelerator__cpu="")
    only(house_python.check_arrows(modules), "config/read.py:1", "from 'config' to 'accelerator'")


def test_nobody_imports_the_package_itself_or_the_facades(package):
    only(
        house_python.check_arrows(package(engine__engine="from deepspeed import DeepSpeedConfig")),
        "engine/engine.py:1", "from 'engine' to '__init__'",
    )  # fmt: skip
    modules = package(engine__engine="from deepspeed.runtime.utils import f", runtime__utils="")
    only(house_python.check_arrows(modules), "engine/engine.py:1", "import the module that it re-exports from")


def test_unknown_room(package):
    only(
        house_python.check_arrows({k: v for k, v in package(attic__box="").items() if k == "deepspeed.attic.box"}),
        "'attic'",
    )


def test_head_node(package):
    modules = package(launcher__runner="from deepspeed.utils import groups", utils__groups="")
    only(house_python.check_arrows(modules), "launcher/runner.py:1", "head node without torch")
    modules = package(
        launcher__runner="from deepspeed.host.ports import free", host__ports="import torch.distributed as dist",
        utils__groups="",
    )  # fmt: skip
    only(house_python.check_head_node(modules), "launcher/runner.py reaches torch through", "deepspeed.host.ports")
    modules = package(host__ports="def f():\n    import torch")
    assert house_python.check_head_node(modules) == []
    modules = package(comm__x="from deepspeed.launcher import runner")
    only(house_python.check_arrows(modules), "launcher is a program")


def test_cycle(package):
    modules = package(
        zero__a="from deepspeed.zero import b", zero__b="import deepspeed.zero.c", zero__c="from .a import x"
    )
    only(
        house_python.check_cycles(modules),
        "deepspeed.zero.a -> deepspeed.zero.b -> deepspeed.zero.c -> deepspeed.zero.a",
    )


def test_cycle_through_a_package(package):
    modules = package(init="from deepspeed.zero.a import x", zero__a="from deepspeed.zero import y")
    only(house_python.check_cycles(modules), "deepspeed.zero -> deepspeed.zero.a -> deepspeed.zero")


def test_imports_stand_at_the_top(package):
    modules = package(zero__core="def f():\n    import json\n\nclass C:\n    from os import path\n")
    first, second = house_python.check_imports_at_top(modules)
    assert "zero/core.py:2 imports json inside a function" in first and "zero/core.py:5 imports os" in second
    modules = package(zero__core="try:\n    import json\nexcept ImportError:\n    json = None\n")
    assert house_python.check_imports_at_top(modules) == []


def test_imports_by_string(package):
    text = "import importlib\n\ndef f(name):\n    return importlib.import_module(name)\n"
    only(house_python.check_imports_at_top(package(zero__core=text)), "zero/core.py:4", "hides an arrow")
    assert house_python.check_imports_at_top({"deepspeed.registry": package(registry=text)["deepspeed.registry"]}) == []


def test_facades_define_nothing(package):
    modules = package(runtime__utils="from deepspeed.utils.x import f\n\ndef g():\n    pass\n", utils__x="")
    only(house_python.check_facades(modules), "runtime/utils.py:3 defines g")
    assert house_python.check_facades(package(runtime__utils="def __getattr__(name):\n    pass\n")) == []


# ---- C++ -----------------------------------------------------------------------------------------------------------

CMAKE = """
# ds_room(attic USES engine)
ds_room(base)
ds_room(plan     USES base)
ds_room(kernels  USES base)
ds_room(comm     USES base kernels      LIBS ds_torch)
ds_room(zero     USES base plan comm    LIBS ds_torch)
ds_room(bindings USES base zero         LIBS ds_torch_python json::json)
"""
FOLDERS = ["base", "plan", "kernels", "comm", "zero", "bindings"]


def test_rooms_of_cmake():
    assert house_cpp.check_cmake(CMAKE, FOLDERS) == []
    assert house_cpp.declared_rooms(CMAKE)["comm"] == ({"base", "kernels"}, {"ds_torch"})
    only(house_cpp.check_cmake(CMAKE, [*FOLDERS, "io"]), "csrc/io has no ds_room")
    only(house_cpp.check_cmake(CMAKE + "ds_room(attic)", FOLDERS), "the room attic is not in the house")
    only(
        house_cpp.check_cmake(CMAKE.replace("plan     USES base", "plan USES base zero"), FOLDERS),
        "ds_room(plan) uses zero",
    )
    only(
        house_cpp.check_cmake(CMAKE.replace("kernels  USES base", "kernels USES base LIBS ds_torch"), FOLDERS),
        "ds_room(kernels) links torch",
    )


@pytest.mark.parametrize(
    "path, line, part",
    [
        ("plan/a.h", '#include "zero/engine.h"', "no arrow leads from plan to zero"),
        ("plan/a.h", '#  include "kernels/adam.h"', "no arrow leads from plan to kernels"),
        (
            "zero/a.cpp",
            '#include "kernels/adam.h"',
            "no arrow leads from zero to kernels",
        ),  # in the house, not in CMake
        ("plan/a.h", '#include "hwy/highway.h"', 'named "<room>/<file>.h"'),
        ("plan/a.h", '#include "a.h"', 'named "<room>/<file>.h"'),
        ("plan/a.h", "#include <base/error.h>", "with quotes"),
        ("plan/a.h", "#include <torch/torch.h>", "plan is torch-free"),
        ("kernels/cuda/a.cu", "#include <c10/util/Half.h>", "kernels is torch-free"),
        ("kernels/a.cpp", "#include <ATen/Tensor.h>", "kernels is torch-free"),
        ("zero/a.cpp", "#include <pybind11/pybind11.h>", "only bindings/ speaks Python"),
        ("zero/a.cpp", "#include <Python.h>", "only bindings/ speaks Python"),
        ("zero/a.cpp", "#include <torch/csrc/utils/pybind.h>", "only bindings/ speaks Python"),
    ],
)
def test_bad_includes(path, line, part):
    only(house_cpp.check_includes({path: "\n" + line + "\n"}, CMAKE), f"csrc/{path}:2", part)


def test_good_includes():
    text = '#include <vector>\n#include "base/error.h"\n#include "plan/shard_map.h"\n#include "comm/communicator.h"\n'
    assert house_cpp.check_includes({"zero/a.cpp": text + "#include <torch/csrc/autograd/engine.h>\n"}, CMAKE) == []
    assert house_cpp.check_includes({"bindings/a.cpp": "#include <pybind11/stl.h>\n#include <Python.h>\n"}, CMAKE) == []


def test_devices_cpp():
    text = '// is_cuda() and "cuda" are words here\nif (tensor.is_cuda()) use("cuda");\n'
    found = house_devices.check_devices_cpp(
        {"storage/a.cpp": text, "kernels/cuda/a.cu": text, "io/async/cufile.cpp": text}
    )
    assert [line.split(": ")[0] for line in found] == [
        "csrc/storage/a.cpp:2 asks for is_cuda", 'csrc/storage/a.cpp:2 asks for "cuda"',
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line", ['x.type == "cuda"', 'x in ("cpu", "cuda")', "torch.cuda.synchronize()", "import torch.cuda.amp"]
)
def test_devices_python(line):
    modules = {path: house_python.Module(path, line + "\n") for path in ("zero/core.py", "accelerator/a.py")}
    only(house_devices.check_devices_python(modules), "python/deepspeed/zero/core.py:1", "accelerator")


def test_bytes_of_states(package):
    for line in ("need = 16 * numel", "need = param.numel() * 2", "held = _C.memory.zero2_need(1, 1, 1, False)"):
        only(house_bytes.check_state_bytes_python(package(engine__memory=line)), "engine/memory.py:1", "deepspeed.plan")
    code = "// 16 * numel\nint64_t need = 4 * rows.size();\nconst StateBytes held = f();\n"
    only(house_bytes.check_state_bytes_cpp({"zero/a.cpp": code}), "zero/a.cpp:3")
    assert house_bytes.check_state_bytes_cpp({"plan/memory_plan.cpp": code}) == []


def test_torch_versions():
    text = "// TORCH_VERSION_MAJOR is asked elsewhere\n#if TORCH_VERSION_MAJOR >= 2\n#endif\n"
    only(house_cpp.check_torch_versions({"zero/engine.cpp": text}), "csrc/zero/engine.cpp:2")
    assert house_cpp.check_torch_versions({"zero/torch_compat.h": text, "comm/c10d_compat.h": text}) == []


@pytest.mark.parametrize(
    "text, name",
    [
        ("int counter = 0;", "counter"),
        ("namespace ds {\nnamespace {\nstd::map<int, std::vector<float>> cache;\n}\n}", "cache"),
        ("static std::mutex lock_;", "lock_"),
        ("std::atomic<bool> ready{false};", "ready"),
        ("inline double scale = 1;", "scale"),
        ("thread_local int depth = 0;", "depth"),
        ("char buffer[64];", "buffer"),
        ("const char* name = nullptr;", "name"),
        ("int f() {\n  static int calls = 0;\n  return ++calls;\n}", "calls"),
        ("int f() { if (true) { thread_local std::string text; } }", "text"),
        ("struct S {\n  static int shared;\n};", "shared"),
        ("class C final : public B {\n public:\n  inline static std::vector<int> all{1, 2};\n};", "all"),
        ("auto pool = make_pool(2);", "pool"),
        ("Thing* thing = new Thing{1};", "thing"),
    ],
)
def test_mutable_globals_are_found(text, name):
    only(house_cpp.check_mutable_globals({"zero/a.cpp": "\n" + text}), f"'{name}'", "csrc/zero/a.cpp:")


@pytest.mark.parametrize(
    "text",
    [
        "constexpr int kSize = 4;",
        "const std::vector<int> kPrimes{2, 3, 5};",
        'static const char* const kNames[] = {"a;b", "c = d"};',
        'inline constexpr char kText[] = R"(int x = 0; {)";',
        "const int& kAlias = kSize;",
        "namespace ds { using Binder = void (*)(int); class Engine; struct Impl; enum class Kind { kA, kB = 2 }; }",
        "struct S {\n  int value = 0;\n  std::vector<int> list{1};\n  S() : value{1}, list(2) { value = 3; }\n};",
        "int f(int a = 1);\nstatic int g(std::function<void()> body = [] { int x = 0; });",
        "int f() {\n  int x = 0;\n  for (int i = 0; i < 3; ++i) x += i;\n  return x;\n}",
        "template <typename T>\nT zero_of = T{};",
        "int f() {\n  static const int kOnce = compute();\n  static constexpr double kTwo = 2;\n  return kOnce;\n}",
        "#define STATE int state = 0\n#define TWO(x) \\\n  static int x = 0;\n",
        "/* int x = 0; */ // static int y;",
        'extern "C" int entry(const char* name);\nextern template class Box<int>;',
        "S::S() : a_{1}, b_{2} {}\nvoid g() { run([&](size_t begin) { total += begin; }); }",
        'DS_BINDINGS(m) { m.def("f", [] { return 42; }); }\nTEST(A, B) { int x = 1; }',
        "struct Deleter { void operator()(int* p) const { delete p; } };\nbool operator==(A a, B b);",
        "namespace ds {\nauto f() -> std::vector<int> {\n  return {1, 2};\n}\n}",
        "std::vector<int> f();\nStatus g() noexcept;\nvoid h(int values[3]);",
    ],
)
def test_what_is_no_mutable_global(text):
    assert house_cpp.check_mutable_globals({"zero/a.cpp": text}) == []


def test_allowed_mutable_global():
    assert house_cpp.check_mutable_globals({"bindings/module.cpp": "static std::vector<Binder> all;"}) == []
    only(house_cpp.check_mutable_globals({"bindings/module.cpp": "static std::vector<Binder> most;"}), "'most'")
