"""Rules about sentences: on this tree, and each broken once in a made-up one."""

import pytest

import house_sentences
from places import ROOT
from sentences import expect_none, only, read, texts

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


def pages():
    """{path: text} of the pages that users and contributors read."""
    return {**texts(ROOT, (".md",), ("docs", "examples")), **{name: read(ROOT, name) for name in TOP_PAGES}}


TOP_PAGES = ("README.md", "CHANGELOG.md")


def test_pages():
    found = pages()
    assert len(found) > 40 and {"docs/tutorials/zero.md", "docs/config.md", "README.md"} <= {*found}
    expect_none(house_sentences.check_pages(found))


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


PAGE = """# What a heading says

Some text. {}
And more; "it is not a" text.

```python
# Of code
Of = 1
```

| Who | of |
|---|---|
| `Of | this` is code | ok |

    Of indented code
"""


@pytest.mark.parametrize("sentence", [*BAD.strip().splitlines(), "**What it costs.** Much.", "(Which is the first.)"])
def test_a_clause_as_a_beginning_on_a_page(sentence):
    text = PAGE.replace("Who", "who")
    only(house_sentences.check_pages({"docs/a.md": text.format(sentence)}), "docs/a.md:3 begins a sentence with")
    for line in (f"- {sentence}", f"12. {sentence}", f"| a | {sentence} |", f"Text.\nText. {sentence}"):
        only(house_sentences.check_pages({"docs/a.md": "Text.\n\n" + line}), "docs/a.md:", "begins a sentence with")


@pytest.mark.parametrize("text", ["It is no file.", "- a\n  b, which\n  are no files", "| a | these were no texts |"])
def test_a_denial_on_a_page(text):
    only(house_sentences.check_pages({"docs/a.md": text}), "docs/a.md:1 says", "is not a")


@pytest.mark.parametrize("sentence", [*GOOD.strip().splitlines(), "Which stage do I need?", "There are no files."])
def test_a_page_that_says_what_it_is(sentence):
    assert house_sentences.check_pages({"docs/a.md": PAGE.replace("Who", "who").format(sentence)}) == []
    assert house_sentences.check_pages({"docs/a.md": f"- One.\n  {sentence}\n\n| {sentence} | it is no longer |"}) == []


def test_a_page_without_its_code_and_headings():
    only(house_sentences.check_pages({"docs/a.md": PAGE.format("Two.")}), "docs/a.md:11 begins a sentence with 'Who'")


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
