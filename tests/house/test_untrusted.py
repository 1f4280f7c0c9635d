"""What comes from elsewhere is not unpickled, and sizes are multiplied with a check."""

import textwrap

import pytest

import house_lists
import house_python
import house_untrusted
from sentences import expect_none


def test_nothing_that_came_over_a_socket_or_a_store_is_unpickled(modules):
    expect_none(house_untrusted.check_unpickling(modules))
    found = {(module.path, name) for module in modules.values() for _, name in house_untrusted.unpicklers(module.tree)}
    assert found == set(house_lists.UNPICKLING), "UNPICKLING has a row that nothing needs"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle\ndef f(store): return pickle.loads(store.get('a'))",
        "import pickle as p\nread = p.Unpickler",
        "from pickle import loads",
        "from torch import load",
        "import io, torch\ndef f(socket): return torch.load(io.BytesIO(socket.recv(9)))",
    ],
)
def test_an_unpickler_is_named(tmp_path, text):
    (tmp_path / "comm").mkdir()
    (tmp_path / "comm" / "join.py").write_text(textwrap.dedent(text))
    (problem,) = house_untrusted.check_unpickling(house_python.load(str(tmp_path)))
    assert problem.startswith("comm/join.py:")


def test_an_unchecked_product_is_named():
    line = "const auto bytes = static_cast<size_t>(numel) * c10::elementSize(type);"
    files = {"storage/x.cpp": line, "zero/x.cpp": line, "plan/y.cpp": "__builtin_mul_overflow"}
    problems = house_untrusted.check_sizes(files)
    assert [problem.split()[0] for problem in problems] == ["csrc/storage/x.cpp:1", "csrc/plan/y.cpp"]
