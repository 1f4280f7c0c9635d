"""The pages name files, rooms and other pages that exist, and docs/README.md lists all of them."""

import ast
import glob
import importlib.util
import os
import re

import pytest

import house_cpp
import house_engine
import house_tables
from places import ROOT
from sentences import listed, read

PAGES = ["architecture.md", "adding.md", "core.md", "testing.md"]


def named_paths(text):
    """What stands in backticks and looks like a path of the tree; <placeholders> end it."""
    for word in re.findall(r"`([^`\s]+)`", text):
        path = word.split("<")[0]
        if re.match(r"^(csrc|python|tests|docs|benchmarks|cmake|tools|examples)/", path):
            yield path if path == word else os.path.dirname(path)


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    paths = list(named_paths(read(ROOT, "docs", page)))
    missing = sorted({path for path in paths if not os.path.exists(os.path.join(ROOT, path))} - {"docs/config.md"})
    assert len(paths) > 5 and not missing, f"docs/{page} names what is not there: {missing}. Correct the page."


@pytest.mark.parametrize("page", PAGES)
def test_short_paths_exist(page):
    """`zero/optimizers/stepping.py` is short for a file of python/deepspeed or csrc."""
    short = re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|h|cpp))`", read(ROOT, "docs", page))
    missing = [
        path
        for path in short
        if not any(os.path.exists(os.path.join(ROOT, base, path)) for base in ("", "csrc", "python/deepspeed"))
    ]
    assert not missing, f"docs/{page} names what is not there: {missing}. Correct the page."


def test_every_room_is_described():
    described = set(re.findall(r"^\| (`[^|]+) \|", read(ROOT, "docs", "architecture.md"), re.M))
    described = {name for cell in described for name in re.findall(r"`([a-z_]+)`", cell)}
    rooms = set(house_cpp.declared_rooms(read(ROOT, "CMakeLists.txt")))
    assert not rooms - described, f"docs/architecture.md does not describe the C++ rooms {sorted(rooms - described)}"
    package = os.path.join(ROOT, "python", "deepspeed")
    folders = {name for name in os.listdir(package) if os.path.exists(os.path.join(package, name, "__init__.py"))}
    assert not folders - described, f"docs/architecture.md does not describe the rooms {sorted(folders - described)}"


def test_every_folder_of_a_room_is_described():
    listed = read(ROOT, "docs", "architecture.md").split("| folder of a C++ room |")[1].split("\n\n")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", listed, re.M)
    described = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    csrc = os.path.join(ROOT, "csrc")
    found = {f"{room}/{name}" for room in os.listdir(csrc) for name in _folders(os.path.join(csrc, room))}
    assert described == found, f"docs/architecture.md and csrc differ in the folders {sorted(described ^ found)}"


def _folders(path):
    return [entry.name for entry in os.scandir(path) if entry.is_dir()] if os.path.isdir(path) else []


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z0-9-]+):", read(ROOT, "Makefile"), re.M))
    for page in PAGES:
        commands = re.findall(r"(?:`|^    (?:\w+=\S+ )*)make ([a-z0-9 -]+)", read(ROOT, "docs", page), re.M)
        wrong = {name for command in commands for name in command.split()} - targets
        assert (commands or page == "core.md") and not wrong, (
            f"docs/{page} speaks of make {sorted(wrong)}, which the Makefile does not have"
        )


def test_the_arrows_of_the_page_are_those_of_the_table():
    """Every floor of the page is a floor of the table, in the same order."""
    block = re.search(r"^Python  (.*?)^ {8}launcher", read(ROOT, "docs", "architecture.md"), re.M | re.S).group(1)
    floors = [set(re.findall(r"\w+", floor)) for floor in block.split("<-")]
    order = []
    for floor in floors:
        floor = {"" if name == "__init__" else name for name in floor}
        order += [number for number, room in enumerate(house_tables.PYTHON_FLOORS) if floor <= room][:1]
    assert len(order) == len(floors), f"the page puts rooms side by side, the table does not: {floors}"
    assert order == sorted(set(order)) and len(order) >= 10


def test_every_engine_part_is_described():
    """The table of parts has the classes that files below engine/ register, with their files."""
    rows = re.findall(r"^\| `(\w+)` \| `(engine/\w+/\w+\.py)` \| \S", read(ROOT, "docs", "files.md"), re.M)
    package = os.path.join(ROOT, "python", "deepspeed")
    found = []
    for path in sorted(glob.glob(os.path.join(package, "engine", "*", "*.py"))):
        found += [(name, os.path.relpath(path, package)) for name in house_engine.part_names(ast.parse(read(path)))]
    assert len(found) > 10 and sorted(rows) == sorted(found), sorted(set(rows) ^ set(found))


def files_page():
    """Returns the module tools/files_page.py, which no package contains."""
    spec = importlib.util.spec_from_file_location("files_page", os.path.join(ROOT, "tools", "files_page.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_files_is_that_of_the_tree():
    made = files_page()
    assert list(made.undescribed()) == [], "these files begin without a sentence that says what they are"
    assert read(ROOT, "docs", "files.md") == made.page(), "docs/files.md is stale: run `make docs`"


@pytest.mark.parametrize(
    "comment, sentence",
    [
        ("One thing. Another.", "One thing"),
        ("One thing, as in a.h\nor ``b.h``:\n\n  int c;", "One thing, as in a.h or `b.h`"),
        ("torch.nn.Linear in tiles", "torch.nn.Linear in tiles"),
        ("Values a|b: (notes) follow", "Values a\\|b"),
    ],
)
def test_the_first_sentence_of_a_file(comment, sentence):
    assert files_page().first_sentence(comment) == sentence


def test_the_page_for_newcomers_is_short():
    words = len(read(ROOT, "docs", "architecture.md").split())
    assert words <= 3500, f"docs/architecture.md has {words} words; a newcomer reads 3,500 in ten minutes. Use core.md."


# ---- links -----------------------------------------------------------------------------------------------------------


def anchors(text):
    """The names by which GitHub links to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    titles = re.findall(r"^#+ +(.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@listed
def broken_links(root, page):
    """``["PAGE links to TARGET, ..."]`` of the links of ``page`` (relative to ``root``) that lead nowhere."""
    plain = re.sub(r"^```.*?^```", "", read(root, page), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^()\s]+)\)", re.sub(r"`[^`\n]*`", "", plain)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        path = os.path.normpath(os.path.join(root, os.path.dirname(page), path)) if path else os.path.join(root, page)
        if not os.path.exists(path):
            yield f"{page} links to {target}, which does not exist"
        elif anchor and anchor not in anchors(read(path)):
            yield f"{page} links to {target}, a page without such a heading"


def all_pages(root):
    found = [os.path.join(root, "README.md"), os.path.join(root, "CHANGELOG.md")]
    for folder in ("docs", "examples"):
        found += glob.glob(os.path.join(root, folder, "**", "*.md"), recursive=True)
    return sorted(os.path.relpath(path, root) for path in found)


def unlisted_pages(root):
    """Pages below docs/ that docs/README.md does not link to."""
    linked = {target.split("#")[0] for target in re.findall(r"\]\(([^()\s]+)\)", read(root, INDEX))}
    linked = {os.path.normpath(os.path.join("docs", target)) for target in linked if target}
    return sorted(page for page in all_pages(root) if page.startswith("docs") and page not in linked | {INDEX})


INDEX = os.path.join("docs", "README.md")


@pytest.mark.parametrize("page", all_pages(ROOT))
def test_links_resolve(page):
    assert broken_links(ROOT, page) == []


def test_the_index_lists_every_page():
    assert not unlisted_pages(ROOT), "docs/README.md: add these pages to the table of their task."


def test_broken_links_and_unlisted_pages_are_found(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("# A page\n\n## It's `here`, *now*\n\n```\n# not a heading\n```\n")
    links = "[a](a.md#its-here-now) [x](y) `[x](z)` [self](#none) [a](a.md#not-a-heading)"
    (tmp_path / "docs" / "b.md").write_text(links)
    (tmp_path / "docs" / "README.md").write_text("[a](a.md#a-page) [up](../README.md) [web](https://example.org/x)")
    (tmp_path / "README.md").write_text("")
    (tmp_path / "CHANGELOG.md").write_text("")
    b = os.path.join("docs", "b.md")
    assert broken_links(tmp_path, INDEX) == [] and unlisted_pages(tmp_path) == [b]
    assert [problem.split()[3].rstrip(",") for problem in broken_links(tmp_path, b)] == [
        "y", "#none", "a.md#not-a-heading"
    ]  # fmt: skip


# ---- the front door --------------------------------------------------------------------------------------------------

CAPABILITIES = ["ZeRO", "Offload", "NVMe", "Pipelines", "Experts", "Long sequences", "Tensor parallelism"]
CAPABILITIES += [
    "Compressed communication",
    "LoRA",
    "Transformer layers",
    "Checkpoints",
    "Launchers",
    "Configuration",
    "Diagnosis",
    "Watching",
]
CAPABILITIES += ["Planning", "Data", "Monitors"]


def test_the_readme_begins_with_what_there_is():
    """Each capability has a tutorial, and a figure with the file that holds it or the words that there is none."""
    first = read(ROOT, "README.md").split("\n## Two commands")[0]
    assert len(first.splitlines()) <= 80, "README.md: what it does, what differs and what is missing fill two screens"
    rows = [line.split(" | ") for line in first.splitlines() if "](docs/tutorials/" in line and line.startswith("|")]
    assert [next(name for name in CAPABILITIES if row[0].startswith(f"| {name}")) for row in rows] == CAPABILITIES
    sources = dict(re.findall(r"\[(\d)\]\((benchmarks/results/[^)]+)\)", first))
    for row in rows:
        number = re.search(r"\[(\d)\] \|$", row[-1])
        assert (number and number[1] in sources) or "not measured" in row[-1], f"README.md: no source: {row[-1]}"
    assert "several have not" in first, "README.md: say what no machine has run"


def test_the_glossary_has_forty_words():
    words = re.findall(r"^\| ([a-z][a-z -]*) \| ", read(ROOT, "docs", "words.md"), re.M)
    assert words[0] == "word" and len(words) == 41 and words[1:] == sorted(set(words[1:]))
