"""Rules about words: names that were replaced stay away, and every verb and transport has its test."""

import re

import sentences
from house_lists import OLD_WORDS, TRANSPORTS_TESTED_ELSEWHERE
from sentences import listed

SEE = "See tests/house/house_lists.py."
SUFFIXES = (".py", ".h", ".cpp", ".cu", ".cuh", ".md", ".txt", ".sh", ".cmake", ".json")


def texts(root, folders=("csrc", "python", "docs", "tests")):
    """{path: text} of what people read."""
    found = sentences.texts(root, SUFFIXES, folders, ("__pycache__", "_lib", "house", ".pytest_cache"))
    return {path: text for path, text in found.items() if ".egg-info/" not in path}


@listed
def check_words(files):
    for path, text in files.items():
        for pattern, folders, word in OLD_WORDS:
            found = re.search(pattern, text) if path.startswith(folders) else None
            if found:
                yield (
                    f"{path}:{text.count(chr(10), 0, found.start()) + 1} says '{found.group()}', which is "
                    f"called {word} here: names are those that a reader of PyTorch, NCCL or Megatron would search for. "
                    f"{SEE}"
                )


@listed
def check_verbs_tested(files):
    """Each verb and each transport stands in the lists of the test that runs all of them over 1 to 8 ranks."""
    test, lists = files["tests/cpp/comm/verbs_test.cpp"], files["tests/cpp/comm/transports.h"]
    where = "tests/cpp/comm/verbs_test.cpp"
    enum = re.search(r"enum class Verb[^{]*\{(.*?)\}", files["csrc/comm/calls/op.h"], re.S)[1]
    verbs = re.findall(r"\bk[A-Z]\w*", enum)
    count = re.search(r"kVerbs = (\d+)", files["csrc/comm/calls/op.h"])
    if count is None or int(count[1]) != len(verbs) or "random() % kVerbs" not in test:
        yield f"{where}: verbs are drawn from the first {count and count[1]} of {len(verbs)}. {SEE}"
    for verb in verbs:
        if f"case Verb::{verb}:" not in test:
            yield f"{where}: nothing says what Verb::{verb} must give. Add a case. {SEE}"
    if "size = 1; size <= 8;" not in test or "ValuesIn(transport_names())" not in test:
        yield f"{where}: each transport is tried with 1 to 8 ranks. {SEE}"
    named = re.search(r"transport_names\(\) \{\s*return \{(.*?)\};|$", lists, re.S)[1]
    named = re.findall(r'"(\w+)"', named or "")
    for path in sorted(files):
        match = re.fullmatch(r"csrc/comm/transports/(\w+)_communicator\.cpp", path)
        if match and match[1] not in named:
            other = TRANSPORTS_TESTED_ELSEWHERE.get(match[1])
            if other is None or other[0] not in files:
                yield (
                    f"{path}: no test runs every verb over it. Add {match[1]!r} to transport_names() and make() in "
                    f"tests/cpp/comm/transports.h. {SEE}"
                )
