"""What comes from elsewhere is not unpickled."""

import os
import textwrap

import pytest

import house_lists
import house_python
import house_untrusted
from places import ROOT


def test_nothing_that_came_over_a_socket_or_a_store_is_unpickled():
    modules = house_python.load(os.path.join(ROOT, "python", "deepspeed"))
    problems = house_untrusted.check_unpickling(modules)
    assert not problems, "\n".join(problems)
    found = {
        (module.path.replace(os.sep, "/"), name)
        for module in modules.values()
        for _, name in house_untrusted.unpicklers(module.tree)
    }
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
    problems = house_untrusted.check_unpickling(house_python.load(str(tmp_path)))
    assert len(problems) == 1 and problems[0].startswith("comm/join.py:"), problems
