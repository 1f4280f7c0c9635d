"""docs/architecture.md and docs/adding.md name files and rooms that exist."""

import os
import re

import pytest

import house_cpp
import house_tables

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PAGES = ["architecture.md", "adding.md"]


def read(*parts):
    with open(os.path.join(ROOT, *parts), encoding="utf-8") as file:
        return file.read()


def named_paths(text):
    """What stands in backticks and looks like a path of the tree; <placeholders> end it."""
    for word in re.findall(r"`([^`\s]+)`", text):
        path = word.split("<")[0]
        if re.match(r"^(csrc|python|tests|docs|benchmarks|cmake|tools|examples)/", path):
            yield path if path == word else os.path.dirname(path)


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    paths = list(named_paths(read("docs", page)))
    missing = sorted({path for path in paths if not os.path.exists(os.path.join(ROOT, path))} - {"docs/config.md"})
    assert len(paths) > 5 and not missing, f"docs/{page} names what is not there: {missing}. Correct the page."


@pytest.mark.parametrize("page", PAGES)
def test_short_paths_exist(page):
    """`zero/stepping.py` is short for a file of python/deepspeed or csrc."""
    short = re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|h|cpp))`", read("docs", page))
    missing = [
        path
        for path in short
        if not any(os.path.exists(os.path.join(ROOT, base, path)) for base in ("", "csrc", "python/deepspeed"))
    ]
    assert not missing, f"docs/{page} names what is not there: {missing}. Correct the page."


def test_every_room_is_described():
    text = read("docs", "architecture.md")
    described = set(re.findall(r"^\| (`[^|]+) \|", text, re.M))
    described = {name for cell in described for name in re.findall(r"`([a-z_]+)`", cell)}
    rooms = set(house_cpp.declared_rooms(read("CMakeLists.txt")))
    assert not rooms - described, f"docs/architecture.md does not describe the C++ rooms {sorted(rooms - described)}"
    package = os.path.join(ROOT, "python", "deepspeed")
    folders = {name for name in os.listdir(package) if os.path.exists(os.path.join(package, name, "__init__.py"))}
    assert not folders - described, f"docs/architecture.md does not describe the rooms {sorted(folders - described)}"


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z0-9-]+):", read("Makefile"), re.M))
    for page in PAGES:
        commands = re.findall(r"(?:`|^    (?:\w+=\S+ )*)make ([a-z0-9 -]+)", read("docs", page), re.M)
        wrong = {name for command in commands for name in command.split()} - targets
        assert commands and not wrong, f"docs/{page} speaks of make {sorted(wrong)}, which the Makefile does not have"


def test_the_arrows_of_the_page_are_those_of_the_table():
    """Every floor of the page is a floor of the table, in the same order."""
    block = re.search(r"^Python  (.*?)^ {8}launcher", read("docs", "architecture.md"), re.M | re.S).group(1)
    floors = [set(re.findall(r"\w+", floor)) for floor in block.split("<-")]
    order = []
    for floor in floors:
        floor = {"" if name == "__init__" else name for name in floor}
        homes = [number for number, room in enumerate(house_tables.PYTHON_FLOORS) if floor <= room]
        assert homes, f"the page puts {sorted(floor)} side by side, the table does not"
        order.append(homes[0])
    assert order == sorted(set(order)) and len(order) >= 10
