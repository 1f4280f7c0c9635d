"""Checks of csrc and CMakeLists.txt against the tables. Each returns a list of sentences, empty when all is well."""

import os
import re

from house_tables import (
    CPP_ARROWS,
    MUTABLE_GLOBALS,
    QUOTED_LIBRARIES,
    ROOMS_WITH_PYTHON,
    ROOMS_WITH_TORCH,
    TORCH_VERSION_HEADERS,
)

SEE = "See docs/architecture.md (the arrows) and tests/house/house_tables.py."
SUFFIXES = (".h", ".hpp", ".cpp", ".cu", ".cuh")


def sources(csrc):
    """{path below csrc, with forward slashes: text}."""
    found = {}
    for folder, _, files in os.walk(csrc):
        for name in sorted(files):
            if name.endswith(SUFFIXES):
                path = os.path.join(folder, name)
                with open(path, encoding="utf-8") as file:
                    found[os.path.relpath(path, csrc).replace(os.sep, "/")] = file.read()
    return found


def declared_rooms(cmake_text):
    """{room: (rooms it uses, libraries)} from the ds_room(...) lines."""
    rooms = {}
    text = re.sub(r"#[^\n]*", "", cmake_text)
    for arguments in re.findall(r"\bds_room\(([^)]*)\)", text):
        name, *words = arguments.split()
        lists = {"USES": [], "LIBS": [], "UNITY": []}
        current = None
        for word in words:
            if word in lists:
                current = lists[word]
            else:
                current.append(word)
        rooms[name] = (set(lists["USES"]), set(lists["LIBS"]))
    return rooms


def check_cmake(cmake_text, folders):
    problems = []
    rooms = declared_rooms(cmake_text)
    for folder in sorted(folders):
        if folder not in rooms:
            problems.append(
                f"csrc/{folder} has no ds_room({folder} ...) line in CMakeLists.txt: nothing builds it. {SEE}"
            )
    for room, (uses, libs) in rooms.items():
        if room not in CPP_ARROWS:
            problems.append(
                f"CMakeLists.txt: the room {room} is not in the house. Draw its arrows in CPP_ARROWS. {SEE}"
            )
            continue
        for used in sorted(uses - CPP_ARROWS[room]):
            problems.append(
                f"CMakeLists.txt: ds_room({room}) uses {used}, but no arrow leads from {room} to {used}. Rooms below "
                f"know nothing of rooms above, so that each builds and is tested without them. {SEE}"
            )
        if any("torch" in lib for lib in libs) and room not in ROOMS_WITH_TORCH:
            problems.append(
                f"CMakeLists.txt: ds_room({room}) links torch. {room} is torch-free: it compiles in seconds and serves "
                f"every torch version with one library. {SEE}"
            )
    return problems


def check_includes(files, cmake_text):
    problems = []
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
                    problems.append(
                        f'{where}: headers of ours are named "<room>/<file>.h", those of others in <>. {SEE}'
                    )
                elif first not in allowed:
                    problems.append(
                        f"{where}: no arrow leads from {room} to {first}. Move what is shared to a room below both, or "
                        f"let the caller pass it in. {SEE}"
                    )
            elif first in CPP_ARROWS and header.endswith(".h") and "/" in header:
                problems.append(f"{where}: headers of ours are included with quotes. {SEE}")
            elif first in ("torch", "ATen", "c10") and room not in ROOMS_WITH_TORCH:
                problems.append(
                    f"{where}: {room} is torch-free, so that it compiles in seconds, is tested alone and serves every "
                    f"torch version. Pass pointers, counts and ds::DType. {SEE}"
                )
            elif (first in ("pybind11", "Python.h") or header.startswith("torch/csrc/utils/pybind")) and (
                room not in ROOMS_WITH_PYTHON
            ):
                problems.append(f"{where}: only bindings/ speaks Python. {SEE}")
    return problems


def check_torch_versions(files):
    problems = []
    for path, text in files.items():
        if path in TORCH_VERSION_HEADERS:
            continue
        for number, line in enumerate(without_comments(text).splitlines(), 1):
            if "TORCH_VERSION" in line or "torch/version.h" in line:
                problems.append(
                    f"csrc/{path}:{number} asks for the version of torch. The differences live in "
                    f"{' and '.join(sorted(TORCH_VERSION_HEADERS))}, so that the next torch changes two files. {SEE}"
                )
    return problems


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


def check_mutable_globals(files):
    problems = []
    for path, text in files.items():
        for line, scope, statement in statements(text):
            name = mutable_name(scope, statement)
            if name is None or (path, name) in MUTABLE_GLOBALS:
                continue
            problems.append(
                f"csrc/{path}:{line} holds the mutable global '{name}': in tests N ranks are N threads of one process, "
                f"and several engines share one, so state belongs to an object that its owner passes around. Make it "
                f"const, or a member; if it truly must be, add a row to MUTABLE_GLOBALS that says why. {SEE}"
            )
    return problems


def mutable_name(scope, statement):
    """The name of the mutable variable with static lifetime that the statement defines, or None."""
    statement = re.sub(r"\[\[.*?\]\]", "", statement).strip()
    statement = re.sub(r"^(inline|static|thread_local|extern|alignas\([^)]*\))\s+(?=\w)", r"\1 ", statement)
    if statement.endswith(" {"):
        return None
    static = re.match(r"^(?:inline\s+)?(static|thread_local)\b", statement)
    namespace_scope = all(kind == "namespace" for kind in scope)
    if not static and not namespace_scope:
        return None
    body = re.sub(r"^((inline|static|thread_local)\s+)+", "", statement)
    if (
        not body
        or NOT_VARIABLES.match(body)
        or body.startswith("extern")
        or CONSTANT.search(body.split("=")[0].split("{")[0])
    ):
        return None
    declared = body.split("=")[0].split("{")[0]
    if "(" in re.sub(r"<[^<>]*(<[^<>]*>[^<>]*)*>", "", declared) or "operator" in declared:
        return None  # a function, or a macro
    match = re.match(r"^[\w:<>,\s*&.]+?[\s*&>](\w+)\s*(\[[^\]]*\])?\s*$", declared)
    return match.group(1) if match else None
