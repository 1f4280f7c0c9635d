"""The architecture of docs/architecture.md, checked on this tree. Each message says what is wrong, why, and the fix."""

import os

import pytest

import house_bytes
import house_cpp
import house_devices
import house_engine
import house_names
import house_published
import house_python
import house_state
import house_untrusted
import house_words
from places import ROOT
from sentences import expect_none, read

CMAKE = read(ROOT, "CMakeLists.txt")


@pytest.mark.parametrize(
    "check",
    [
        house_python.check_arrows,
        house_python.check_cycles,
        house_python.check_imports_at_top,
        house_python.check_head_node,
        house_python.check_facades,
        house_python.check_groups,
        house_devices.check_devices_python,
        house_bytes.check_state_bytes_python,
        house_names.check_joined,
        house_engine.check_stage_numbers_python,
        house_engine.check_checkpoint_without_engine,
        house_state.check_python_state,
        house_state.check_python_classes,
        house_published.check_unread_arguments,
        house_published.check_users_of_published,
        house_published.check_published_holds_nothing,
    ],
    ids=lambda check: check.__name__[len("check_") :],
)
def test_python(modules, check):
    expect_none(check(modules))


@pytest.mark.parametrize(
    "check",
    [
        house_names.check_joined_cpp,
        house_cpp.check_includes,
        house_devices.check_devices_cpp,
        house_bytes.check_state_bytes_cpp,
        house_cpp.check_torch_versions,
        house_cpp.check_mutable_globals,
        house_engine.check_stage_numbers_cpp,
        house_engine.check_binding_arguments,
        house_engine.check_engine_options,
        house_engine.check_option_defaults,
        house_state.check_cpp_classes,
        house_state.check_allocations,
        house_untrusted.check_sizes,
    ],
    ids=lambda check: check.__name__[len("check_") :],
)
def test_cpp(files, check):
    assert "zero/engine_options.cpp" in files
    expect_none(check(files, CMAKE) if check is house_cpp.check_includes else check(files))


def test_rooms_of_cmake():
    csrc = os.path.join(ROOT, "csrc")
    expect_none(
        house_cpp.check_cmake(CMAKE, [name for name in os.listdir(csrc) if os.path.isdir(os.path.join(csrc, name))])
    )


def test_lengths_words_and_tests_of_verbs():
    expect_none(house_state.check_length(ROOT))
    files = house_words.texts(ROOT)
    assert len(files) > 100
    expect_none(house_words.check_words(files) + house_words.check_verbs_tested(files))
