"""The op table of ``ds_report``: one line per native op."""

from deepspeed.env_report import native
from deepspeed.host import devices
from deepspeed.host.libraries import missing_libraries
from deepspeed.host.programs import find_program
from deepspeed.registry import load_target

WIDTH = 78
_NAME_WIDTH = 23


def title(*lines):
    return ["-" * WIDTH, *lines, "-" * WIDTH]


def op_lines(facts):
    """The table: name, installed, compatible, and why not."""
    dots = "." * (_NAME_WIDTH - len("op name"))
    lines = title(
        "DeepSpeed native op report",
        "installed: the op lies in deepspeed's libraries. compatible: it can be used on this machine.",
        "Ops of other packages are compiled when they are first used, which requires ninja and a C++ compiler.",
    )
    lines.append(f"ninja {'.' * (_NAME_WIDTH - len('ninja'))} {'[OKAY]' if find_program('ninja') else '[NO]'}")
    lines += title(f"op name {dots} installed .. compatible")
    for name, installed, compatible, why_not in native.op_rows(load_target("deepspeed.ops.op_table:OPS"), facts):
        dots = "." * (_NAME_WIDTH - len(name))
        left = "[YES] ......" if installed else "[NO] ......."
        right = "[OKAY]" if compatible else "[NO]"
        lines.append(f"{name} {dots} {left} {right:<6}  {first_sentence(why_not)}".rstrip())
    return lines


def first_sentence(text):
    """A reason short enough for a table; the whole text is among the warnings."""
    return text.partition(". ")[0]


def op_warnings():
    """Sentences about system libraries that ops need and that are not found."""
    found = []
    for row in load_target("deepspeed.ops.op_table:OPS"):
        # A library for GPUs is missed only where there is one.
        if "cpu" in row.devices or devices.nvidia_device_count():
            found += missing_libraries(row.name, row.system)
    return found
