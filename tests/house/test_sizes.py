"""Sizes that come from a caller or from a file are multiplied with a check."""

import os

import house_cpp
import house_untrusted
from places import ROOT


def test_sizes_are_multiplied_with_a_check():
    problems = house_untrusted.check_sizes(house_cpp.sources(os.path.join(ROOT, "csrc")))
    assert not problems, "\n".join(problems)


def test_an_unchecked_product_is_named():
    line = "const auto bytes = static_cast<size_t>(numel) * c10::elementSize(type);"
    files = {"storage/x.cpp": line, "zero/x.cpp": line, "plan/y.cpp": "__builtin_mul_overflow"}
    problems = house_untrusted.check_sizes(files)
    assert [problem.split()[0] for problem in problems] == ["csrc/storage/x.cpp:1", "csrc/plan/y.cpp"]
