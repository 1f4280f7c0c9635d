"""The rules of ``published/``, on this tree and on made-up ones, each of which breaks a rule once."""

import ast
import types

import pytest

import house_published
from sentences import only


def made_up(path, text):
    tree = ast.parse(text)
    module = types.SimpleNamespace(path=path, room=path.split("/")[0], tree=tree, name="deepspeed.a", is_package=False)
    module.imports = lambda: (
        (node.lineno, node.module, [alias.name for alias in node.names], True)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    )
    return {path: module}


UNREAD = [
    "class Loader:\n    def __init__(self, data, rank): self.data = data",
    "class Loader:\n    def __init__(self, *, rank=0): rank = 1",
    "class Loader(Base):\n    def __init__(self, data, rank=None): super().__init__(data)",
]


@pytest.mark.parametrize("text", UNREAD)
def test_an_argument_that_nobody_reads(text):
    only(house_published.check_unread_arguments(made_up("zero/a.py", text)), "zero/a.py:2 Loader takes 'rank'")
    assert house_published.check_unread_arguments(made_up("published/a.py", text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "class Loader:\n    def __init__(self, data): self.data = data",
        "class Loader:\n    def __init__(self, *args, **kwargs): pass",
        "class Loader:\n    def __init__(self, size): self.get = lambda: size",
        "class _Private:\n    def __init__(self, size): pass",
        "class Loader:\n    def set(self, size): pass",
    ],
)
def test_arguments_that_are_allowed(text):
    assert house_published.check_unread_arguments(made_up("zero/a.py", text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "from deepspeed.published.stage3 import DeepSpeedZeRoOffload",
        "from deepspeed.published import stage3",
        "_WHERE = {'DeepSpeedZeRoOffload': 'deepspeed.published.stage3'}",
        "register('a', 'deepspeed.published.stage3:DeepSpeedZeRoOffload')",
    ],
)
def test_a_room_that_uses_published(text):
    only(
        house_published.check_users_of_published(made_up("checkpoint/a.py", text)), "checkpoint/a.py:1 uses deepspeed."
    )
    for room in ("engine", "runtime", "published"):
        assert house_published.check_users_of_published(made_up(f"{room}/a.py", text)) == []
    table = house_published.check_users_of_published(made_up("zero/__init__.py", text))
    assert len(table) == ("import" in text)


def test_a_published_class_that_works():
    text = (
        "class Loader(Base):\n"
        "    def __init__(self, data, rank): super().__init__(data)\n"
        "    def load(self, state, rank=0):\n"
        "        'Loads.'\n"
        "        super().load(state)\n"
    )
    assert house_published.check_published_holds_nothing(made_up("published/a.py", text)) == []
    text += "    def save(self): return self.data\n"
    only(house_published.check_published_holds_nothing(made_up("published/a.py", text)), "published/a.py:6 Loader.save")
    assert house_published.check_published_holds_nothing(made_up("zero/a.py", text)) == []
