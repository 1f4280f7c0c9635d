"""Folders of a room have arrows: on this tree, and on made-up ones, each of which breaks the rule once."""

import pytest

import house_folders
import house_python
from house_tables import CPP_FOLDERS, PYTHON_FOLDERS
from sentences import expect_none, only


def test_folders_of_cpp_rooms(files):
    expect_none(house_folders.check_cpp_folders(files))


def test_folders_of_python_rooms(modules):
    expect_none(house_folders.check_python_folders(modules))


def test_the_tables_name_folders_that_are_there(files, modules):
    cpp = {(path.split("/")[0], house_folders.folder_of(path)) for path in files}
    python = {(module.room, house_folders.folder_of(module.path)) for module in modules.values()}
    for found, table in ((cpp, CPP_FOLDERS), (python, PYTHON_FOLDERS)):
        rows = [(room, name) for room, floors in table.items() for floor in floors for name in floor]
        assert len(rows) == len(set(rows)) and set(rows) <= found, set(rows) - found


@pytest.mark.parametrize(
    "path, header, parts",
    [
        ("zero/spaces/a.h", "zero/step/b.h", ["no arrow leads from zero/spaces to zero/step"]),
        ("zero/gathers/sources/a.cpp", "zero/gradients/b.h", ["from zero/gathers to zero/gradients"]),
        ("io/async/a.cpp", "io/zip/b.h", ["from io/async to io/zip"]),
        ("io/made/a.cpp", "io/zip/b.h", ["the folder io/made is on no floor"]),
        ("formats/one/a.cpp", "formats/two/b.h", ["the folder formats/one is on no floor"]),
    ],
)
def test_an_include_without_an_arrow(path, header, parts):
    files = {path: f'#include <vector>\n#include "{header}"\n'}
    only(house_folders.check_cpp_folders(files), f"csrc/{path}:2 includes {header}", *parts)


def test_includes_with_an_arrow():
    headers = ["zero/spaces/a.h", "zero/step/strategies/b.h", "io/async/c.h", "zero/d.h"]
    text = "".join(f'#include "{header}"\n' for header in headers)
    assert house_folders.check_cpp_folders({"zero/step/a.cpp": text, "zero/engine.cpp": text}) == []


@pytest.mark.parametrize(
    "path, line, part",
    [
        (
            "checkpoint/write/a.py",
            "from deepspeed.checkpoint.read import b",
            "from checkpoint/write to checkpoint/read",
        ),
        ("checkpoint/layouts/a.py", "import deepspeed.checkpoint.save.b", "from checkpoint/layouts to checkpoint/save"),
        ("checkpoint/new/a.py", "from deepspeed.checkpoint.read.b import c", "checkpoint/new is on no floor"),
    ],
)
def test_an_import_without_an_arrow(tmp_path, path, line, part):
    texts = {path: line + "\n", "checkpoint/read/b.py": "c = 1\n", "checkpoint/save/b.py": "", "checkpoint/d.py": ""}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    only(house_folders.check_python_folders(house_python.load(str(tmp_path))), f"{path}:1 imports", part)
    (tmp_path / path).write_text("from deepspeed.checkpoint import d\n")
    assert house_folders.check_python_folders(house_python.load(str(tmp_path))) == []
