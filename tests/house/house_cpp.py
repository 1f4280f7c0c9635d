"""Checks of csrc and CMakeLists.txt against the tables. Each returns a list of sentences, empty when all is well."""

import re

from house_tables import (
    CPP_ARROWS,
    MUTABLE_GLOBALS,
    QUOTED_LIBRARIES,
    ROOMS_WITH_PYTHON,
    ROOMS_WITH_TORCH,
    TORCH_VERSION_HEADERS,
)
from sentences import listed, texts

SEE = "See docs/architecture.md (the arrows) and tests/house/house_tables.py."
SUFFIXES = (".h", ".hpp", ".cpp", ".cu", ".cuh")


def sources(csrc):
    """{path below csrc, with forward slashes: text}."""
    return texts(csrc, SUFFIXES)


def lines_without_comments(files, outside=()):
    """(path, number, line) of the sources that are not ``outside``."""
    for path, text in files.items():
        for number, line in enumerate(without_comments(text).splitlines() if path not in outside else (), 1):
            yield path, number, line


def declared_rooms(cmake_text):
    """{room: (rooms it uses, libraries)} from the ds_room(...) lines."""
    rooms = {}
    for arguments in re.findall(r"\bds_room\(([^)]*)\)", re.sub(r"#[^\n]*", "", cmake_text)):
        name, *lists = re.split(r"\s+(?=(?:USES|LIBS|UNITY)\b)", arguments.strip())
        lists = {words.split()[0]: set(words.split()[1:]) for words in lists}
        rooms[name] = (lists.get("USES", set()), lists.get("LIBS", set()))
    return rooms


@listed
def check_cmake(cmake_text, folders):
    rooms = declared_rooms(cmake_text)
    for folder in sorted(folders):
        if folder not in rooms:
            yield f"csrc/{folder} has no ds_room({folder} ...) line in CMakeLists.txt: nothing builds it. {SEE}"
    for room, (uses, libs) in rooms.items():
        if room not in CPP_ARROWS:
            yield f"CMakeLists.txt: the room {room} is not in the house. Draw its arrows in CPP_ARROWS. {SEE}"
            continue
        for used in sorted(uses - CPP_ARROWS[room]):
            yield (
                f"CMakeLists.txt: ds_room({room}) uses {used}, but no arrow leads from {room} to {used}. Rooms below "
                f"know nothing of rooms above, so that each builds and is tested without them. {SEE}"
            )
        if any("torch" in lib for lib in libs) and room not in ROOMS_WITH_TORCH:
            yield (
                f"CMakeLists.txt: ds_room({room}) links torch. {room} is torch-free: it compiles in seconds and serves "
                f"every torch version with one library. {SEE}"
            )


@listed
def check_includes(files, cmake_text):
    rooms = declared_rooms(cmake_text)
    for path, text in files.items():
        room = path.split("/")[0]
        allowed = CPP_ARROWS.get(room, set()) & rooms.get(room, (set(), set()))[0] | {room}
        for number, line in enumerate(text.splitlines(), 1):
            match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
            if not match:
                continue
            quote, header = match.groups()
            where = f"csrc/{path}:{number} includes {header}"
            first = header.split("/")[0]
            if quote == '"':
                if room in QUOTED_LIBRARIES.get(first, ()):
                    continue
                if "/" not in header or first not in CPP_ARROWS:
                    yield f'{where}: headers of ours are named "<room>/<file>.h", those of others in <>. {SEE}'
                elif first not in allowed:
                    yield (
                        f"{where}: no arrow leads from {room} to {first}. Move what is shared to a room below both, or "
                        f"let the caller pass it in. {SEE}"
                    )
            elif first in CPP_ARROWS and header.endswith(".h") and "/" in header:
                yield f"{where}: headers of ours are included with quotes. {SEE}"
            elif first in ("torch", "ATen", "c10") and room not in ROOMS_WITH_TORCH:
                yield (
                    f"{where}: {room} is torch-free, so that it compiles in seconds, is tested alone and serves every "
                    f"torch version. Pass pointers, counts and ds::DType. {SEE}"
                )
            elif (first in ("pybind11", "Python.h") or header.startswith("torch/csrc/utils/pybind")) and (
                room not in ROOMS_WITH_PYTHON
            ):
                yield f"{where}: only bindings/ speaks Python. {SEE}"


@listed
def check_torch_versions(files):
    for path, number, line in lines_without_comments(files, TORCH_VERSION_HEADERS):
        if "TORCH_VERSION" in line or "torch/version.h" in line:
            yield (
                f"csrc/{path}:{number} asks for the version of torch. The differences live in "
                f"{' and '.join(sorted(TORCH_VERSION_HEADERS))}, so that the next torch changes two files. {SEE}"
            )


# ---- mutable globals -----------------------------------------------------------------------------------------------


def without_comments(text):
    """The text without comments and with empty literals; line numbers stay."""
    pattern = re.compile(
        r'R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9A-Za-z_])\'(?:\\.|[^\'\\\n])+\'',
        re.S,
    )

    def blank(match):
        found = match.group()
        lines = "\n" * found.count("\n")
        return lines if found.startswith(("//", "/*")) else '""' + lines

    return pattern.sub(blank, text)


NOT_VARIABLES = re.compile(
    r"^(using|typedef|template|struct|class|enum|union|namespace|static_assert|friend|extern \"\"|public|private|"
    r"protected|return|case|default|goto|break|continue|if|for|while|do|else|switch|try|catch|delete|throw|new|asm)\b"
)
CONSTANT = re.compile(r"\bconstexpr\b|\bconst\b(?![^=;({]*\*\s*\w+\s*$)")


def statements(text):
    """(line, scope, statement) of declarations; scope: the kinds of the braces around it, outermost first.

    Kinds: "namespace", "type", "function" (which stands for every other brace with statements in it), "value".
    """
    text = re.sub(
        r"^[ \t]*#(?:[^\n\\]|\\\n|\\.)*", lambda m: "\n" * m.group().count("\n"), without_comments(text), flags=re.M
    )
    text = re.sub(r"\b(public|private|protected)\s*:(?!:)", ";", text)
    scope, current, start, depth, line = [], "", 1, 0, 1
    for char in text:
        if not current.strip():
            start = line
        if char == "\n":
            line += 1
        if char in "([":
            depth += 1
        elif char in ")]":
            depth -= 1
        if char == "{" and depth == 0 and not (scope and scope[-1] == "value"):
            head = " ".join(current.split())
            kind = _brace_kind(head, scope)
            if kind == "value":
                current += char
            else:
                yield start, tuple(scope), head + " {"
                current = ""
            scope.append(kind)
        elif char == "{":
            scope.append("value")
            current += char
        elif char == "}":
            kind = scope.pop() if scope else "namespace"
            if kind == "value":
                current += char
            else:
                current = ""
        elif char == ";" and depth == 0 and not (scope and scope[-1] == "value"):
            yield start, tuple(scope), " ".join(current.split())
            current = ""
        else:
            current += char


def _brace_kind(head, scope):
    if re.search(r"\bnamespace\b[\w:\s]*$", head) or head.startswith('extern ""'):
        return "namespace"
    if (
        re.match(r"^(template\s*<.*>\s*)?(typedef\s+)?(struct|class|enum|union)\b", head)
        and "(" not in head.split("=")[0]
    ):
        return "type"
    if re.search(r"(=|\breturn|,)$", head) or (
        re.search(r"[\w>\]]$", head) and "(" not in head and not re.match(r"^(do|else|try)\b", head)
    ):
        return "value"
    return "function"


@listed
def check_mutable_globals(files):
    for path, text in files.items():
        for line, scope, statement in statements(text):
            name = mutable_name(scope, statement)
            if name is not None and (path, name) not in MUTABLE_GLOBALS:
                yield (
                    f"csrc/{path}:{line} holds the mutable global '{name}': in tests N ranks are N threads of one "
                    f"process, and several engines share one, so state belongs to an object that its owner passes "
                    f"around. Make it const, or a member; if it truly must be, add a row to MUTABLE_GLOBALS that says "
                    f"why. {SEE}"
                )


def mutable_name(scope, statement):
    """The name of the mutable variable with static lifetime that the statement defines, or None."""
    statement = re.sub(r"\[\[.*?\]\]", "", statement).strip()
    statement = re.sub(r"^(inline|static|thread_local|extern|alignas\([^)]*\))\s+(?=\w)", r"\1 ", statement)
    if statement.endswith(" {"):
        return None
    if not re.match(r"^(?:inline\s+)?(static|thread_local)\b", statement) and {*scope} - {"namespace"}:
        return None
    body = re.sub(r"^((inline|static|thread_local)\s+)+", "", statement)
    declared = body.split("=")[0].split("{")[0]
    if not body or NOT_VARIABLES.match(body) or body.startswith("extern") or CONSTANT.search(declared):
        return None
    if "(" in re.sub(r"<[^<>]*(<[^<>]*>[^<>]*)*>", "", declared) or "operator" in declared:
        return None  # a function, or a macro
    match = re.match(r"^[\w:<>,\s*&.]+?[\s*&>](\w+)\s*(\[[^\]]*\])?\s*$", declared)
    return match.group(1) if match else None
