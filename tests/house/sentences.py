"""What the rules share: a rule gives sentences, one for each place of the tree that breaks it, and none when all is
well."""

import functools
import pathlib


def listed(check):
    """The rule as a function that returns a list of what it yields."""

    @functools.wraps(check)
    def answer(*args, **options):
        return list(check(*args, **options))

    return answer


def read(*parts):
    return pathlib.Path(*parts).read_text(encoding="utf-8")


def texts(root, suffixes, tops=("",), without=("__pycache__", "_lib")):
    """{path below root: text} of the files with these suffixes below the folders ``tops``, in order."""
    paths = [path for top in tops for path in sorted(pathlib.Path(root, top).rglob("*")) if path.suffix in suffixes]
    paths = {path.relative_to(root): path for path in paths}
    return {below.as_posix(): read(path) for below, path in paths.items() if not {*without} & {*below.parts[:-1]}}


def expect_none(problems):
    assert not problems, "\n\n" + "\n\n".join(problems)


def only(problems, *parts):
    """Asserts that there is one sentence, with these parts."""
    assert len(problems) == 1, problems
    for part in parts:
        assert part in problems[0], problems[0]
