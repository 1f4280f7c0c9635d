"""Rules about state, size, words and tests of verbs: on this tree, and each broken once in a made-up one."""

import ast
import re
import types

import pytest

import house_state
import house_words
from places import ROOT
from sentences import only


def python(path, text):
    """A package of one module, and the module ``deepspeed.zero.sharding`` beside it."""
    module = types.SimpleNamespace(path=path, tree=ast.parse(text))
    return {"deepspeed.made": module, "deepspeed.zero.sharding": types.SimpleNamespace(path="x.py", tree=ast.parse(""))}


# ---- Python globals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, name",
    [
        ("_cache = {}\n", "_cache"),
        ("_seen = set()\n", "_seen"),
        ("seen: list = []\n", "seen"),
        ("_rows = [1, 2]\ndef f():\n    _rows.append(3)\n", "_rows"),
        ("ROWS = {1: 2}\ndef f():\n    ROWS[3] = 4\n", "ROWS"),
        ("ROWS = {1: 2}\ndef f():\n    del ROWS[1]\n", "ROWS"),
        ("_n = 0\ndef f():\n    global _n\n    _n += 1\n", "_n"),
        ("_known = weakref.WeakKeyDictionary()\n", "_known"),
        ("_here = threading.local()\n", "_here"),
        ("_ids = itertools.count()\n", "_ids"),
        ("tracker = Tracker()\n", "tracker"),
        ("settings = defaults()\ndef f(x):\n    settings.value = x\n", "settings"),
        ("from deepspeed.zero import sharding\ndef f():\n    sharding.on = True\n", "sharding.on"),
    ],
)
def test_state_of_a_module(text, name):
    only(house_state.check_python_state(python("moe/made.py", text)), "moe/made.py:", f"'{name}'")


@pytest.mark.parametrize(
    "text",
    [
        "_ROWS = {1: 2}\ndef f():\n    return _ROWS[1]\n",
        "_ROWS = [1]\ndef f():\n    _ROWS = []\n    _ROWS.append(1)\n",
        "_PATTERN = re.compile('a')\n_LOCK = threading.Lock()\n_PATH = os.path.join('a', 'b')\n",
        "_lock = threading.Lock()\ndef f():\n    global _lock\n    _lock = threading.Lock()\n",
        "NAMES = list(_layout['names'])\n__all__ = ['a']\n",
        "class C:\n    rows = {}\n",
        "def f(rows):\n    rows.append(1)\n",
    ],
)
def test_what_is_no_state_of_a_module(text):
    assert house_state.check_python_state(python("moe/made.py", text)) == []


def test_listed_state():
    assert house_state.check_python_state(python("log.py", "_said = set()\n")) == []


# ---- classes ---------------------------------------------------------------------------------------------------------


def test_a_wide_class():
    body = "".join(f"    def f{i}(self): pass\n" for i in range(26))
    only(house_state.check_python_classes(python("moe/made.py", f"class Wide:\n{body}")), "moe/made.py:1", "26 methods")
    both = body.replace("def f25", "def f24")  # a property and its setter are one name
    assert house_state.check_python_classes(python("moe/made.py", f"class Narrow:\n{both}")) == []


def test_a_wide_class_in_cpp():
    body = "".join(f"  int f{i}(std::function<void(int)> g = {{}}) const;\n" for i in range(26))
    extra = (
        "  using A = int (*)(int);\n  std::function<void(int)> field_;\n  int value_ = compute(3);\n"
        "  friend void g(int);\n  struct Inner { int h(); };\n"
    )
    head = "namespace ds {\nclass Wide final : public Base {\n public:\n  Wide(int);\n  ~Wide();\n"
    text = head + extra + body + "};\n}\n"
    only(house_state.check_cpp_classes({"zero/a.h": text}), "csrc/zero/a.h:2", "class Wide has 26 methods")
    assert house_state.check_cpp_classes({"zero/a.h": text.replace("int f25(", "int f24(")}) == []
    assert house_state.check_cpp_classes({"config/field.h": text.replace("Wide", "Field")}) == []


# ---- allocations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "x = at::empty({n}, options);", "x = at::zeros_like(y);", "x = torch::full({n}, 1);", "x = y.new_empty({n});",
        "x = at::empty_strided(a, b);",
    ],
)  # fmt: skip
def test_a_tensor_made_in_the_core(line):
    files = {"zero/made.cpp": "\n" + line, "storage/made.cpp": line}
    only(house_state.check_allocations(files), "csrc/zero/made.cpp makes tensors at 1 places (lines 2), and 0 have")


def test_what_is_no_allocation():
    text = "// at::empty({n})\nx = at::empty({0}, options);\ny = at::empty(s, at::TensorOptions().device(at::kMeta));\n"
    assert house_state.check_allocations({"zero/made.cpp": text}) == []
    listed = "x = at::zeros({n});\n"
    assert house_state.check_allocations({"zero/gradients/flag_exchange.cpp": listed}) == []
    made = {"zero/gradients/flag_exchange.cpp": listed * 2}
    only(house_state.check_allocations(made), "at 2 places", "1 have a reason")


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_long_file(tmp_path):
    for folder, name, lines in (("csrc", "a.cpp", 451), ("csrc", "b.cpp", 450), ("tests", "c.py", 600)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text("int f();\n" * lines)
    only(house_state.check_length(str(tmp_path)), "csrc/a.cpp has 451 lines, more than 450")


# ---- words -----------------------------------------------------------------------------------------------------------


OLD = """
csrc/zero/a.h | std::vector<Voice> voices_; | DiagnosticCallbacks
csrc/comm/a.h | Aside aside(lock); | BlockingRegion
csrc/comm/a.h | // the greeting of a new rank | FingerprintExchange
csrc/comm/a.h | Introduction introduction; | Rendezvous
python/deepspeed/comm/a.py | patience = 3 | timeout
docs/a.md | names the culprit | nonfinite gradient
python/deepspeed/zero/a.py | with pose(param): | with_shape_only
tests/dist/a.py | from deepspeed.zero import letting_go | finalizers
docs/a.md | see zero/joined.py | cross_engine_scaling
csrc/zero/a.h | Hold hold_; | a read lease
csrc/zero/a.h | at::Tensor carrier; | a wire buffer
csrc/comm/a.h | struct Landing { | a receive buffer
python/deepspeed/zero/a.py | def hand_out_grads(self): | assign_optimizer_grads
csrc/zero/a.h | void part_grads(); | split_grad_buffer
csrc/zero/a.h | void join_grads(); | alias_grad_buffer
python/deepspeed/moe/a.py | made = PaddedJourney(group) | TokenDispatcher
python/deepspeed/comm/a.py | class Carrier: | GroupCommunicator
python/deepspeed/comm/a.py | with timed.unheard(): | suppress_logging
docs/a.md | `launcher/by_hand.py` | launcher/no_ssh.py
"""


@pytest.mark.parametrize("row", OLD.strip().splitlines(), ids=lambda row: row.rpartition(" | ")[2])
def test_an_old_word(row):
    path, text, word = row.split(" | ")
    only(house_words.check_words({path: "\n" + text}), f"{path}:2 says", word)


def test_words_that_stay():
    text = "ReduceLROnPlateau(optimizer, patience=2)\n# payloads aside\ngrads.joined()\n# # Introduction\n"
    assert house_words.check_words({"docs/a.md": text, "python/deepspeed/comm/a.py": "carriers.of(group)"}) == []


# ---- verbs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_the_test():
    wanted = re.compile(r"tests/cpp/comm/|csrc/comm/|tests/dist/test_comm_verbs")
    return {path: text for path, text in house_words.texts(ROOT).items() if wanted.match(path)}


@pytest.mark.parametrize(
    "path, old, new, part",
    [
        ("csrc/comm/calls/op.h", "  kBarrier,", "  kBarrier,\n  kAllToAllV,", "the first 11 of 12"),
        ("tests/cpp/comm/verbs_test.cpp", "case Verb::kGather:", "", "Verb::kGather must give"),
        ("tests/cpp/comm/verbs_test.cpp", "size <= 8;", "size <= 4;", "1 to 8 ranks"),
        ("tests/cpp/comm/transports.h", '"shm",', "", "Add 'shm' to transport_names()"),
    ],
)
def test_a_verb_or_transport_without_a_test(of_the_test, path, old, new, part):
    assert old in of_the_test[path]
    problems = house_words.check_verbs_tested({**of_the_test, path: of_the_test[path].replace(old, new)})
    assert any(part in problem for problem in problems), problems


def test_a_new_transport(of_the_test):
    made = {**of_the_test, "csrc/comm/transports/ucx_communicator.cpp": ""}
    only(house_words.check_verbs_tested(made), "csrc/comm/transports/ucx_communicator.cpp", "'ucx'")
