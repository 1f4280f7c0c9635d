"""Rules about sentences: on this tree, and each broken once in a made-up one."""

import pytest

import house_sentences
from places import ROOT
from sentences import expect_none, only, texts

SUFFIXES = (".py", ".h", ".cpp", ".cu", ".cuh", ".md", ".sh", ".cmake")
FOLDERS = ("csrc", "python", "tests", "benchmarks", "examples", "tools", "cmake", "docs")


@pytest.fixture(scope="module")
def written():
    """{path: text} of sources and pages, without these rules."""
    found = texts(ROOT, SUFFIXES, FOLDERS, ("__pycache__", "_lib", "house", "out", "results"))
    assert len(found) > 1000
    return found


def test_comments(written):
    expect_none(house_sentences.check_beginnings(written))


def test_messages(written):
    """Tests quote messages of others, which say what they want."""
    expect_none(
        house_sentences.check_denials({path: written[path] for path in written if not path.startswith("tests")})
    )


def test_so_many(written):
    expect_none(house_sentences.check_so_many(written))


BAD = """
Of each group: its ranks.
Who asks again learns why.
What a slot's number means in all calls here.
Whose experts are trained.
Which ranks share what.
How a bucket leaves.
Why the file cannot be written.
Where the step is: peaks are kept for each moment.
When the caller waits for a call.
"""


@pytest.mark.parametrize("comment", BAD.strip().splitlines())
def test_a_clause_as_a_beginning(comment):
    cpp = {"csrc/zero/a.h": f"int a;\n// {comment}\n// And more.\nint b();\n"}
    only(house_sentences.check_beginnings(cpp), "csrc/zero/a.h:2 begins with", comment[:20])
    only(house_sentences.check_beginnings({"csrc/zero/a.h": f"int a;  // {comment}\n"}), "csrc/zero/a.h:1")
    python = {"python/deepspeed/a.py": f'def f():\n    """{comment}"""\n'}
    only(house_sentences.check_beginnings(python), "python/deepspeed/a.py:2")
    only(house_sentences.check_beginnings({"python/deepspeed/a.py": f"x = 1\n# {comment}\n"}), "a.py:2")


GOOD = """
The ranks of each group.
Whether the file can be written.
Where nothing rests, the lease is a view.
When the step is due, gradients are reduced.
Offsets of each row.
Returns what was written.
Official names.
However long it takes.
"""


@pytest.mark.parametrize("comment", GOOD.strip().splitlines())
def test_a_beginning_that_says_what_it_is(comment):
    cpp = {"csrc/zero/a.h": f'// {comment}\n// Of which the first one counts.\nchar* b = "// Of";  /* x */\n'}
    assert house_sentences.check_beginnings(cpp) == []
    python = {
        "python/deepspeed/a.py": f'"""{comment}\n\n    Of text below the first line."""\nx = "# Of"\n# {comment}\n'
    }
    assert house_sentences.check_beginnings(python) == []


@pytest.mark.parametrize(
    "path, text",
    [
        ("a.py", 'raise ValueError(f"{x} is no file")'),
        ("a.py", 'log("these are no" " tensors")'),
        ("a.cpp", 'fail(kValue, name, " is no text");'),
        ("a.cpp", 'const char* t = R"(values that were no numbers)";'),
    ],
)
def test_a_denial(path, text):
    only(house_sentences.check_denials({path: "\n" + text}), f"{path}:2 says", "is not a")


@pytest.mark.parametrize(
    "path, text",
    [
        ("a.py", '"""It is no text."""\n# it is no text\nx = "there is no file, and it is no longer there"\n'),
        ("a.cpp", '// "is no text"\nf("There are no files; it is not a text");\n'),
    ],
)
def test_what_is_not_a_denial(path, text):
    assert house_sentences.check_denials({path: text}) == []


def test_so_many_is_named():
    only(house_sentences.check_so_many({"docs/a.md": "one\nwaits for so\nmany steps\n"}), "docs/a.md:2 says 'so many'")
    assert house_sentences.check_so_many({"docs/a.md": "takes so many registers that it is slow"}) == []
