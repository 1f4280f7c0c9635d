"""Writes docs/files.md: every file of csrc and python/deepspeed with the sentence at its top.

    python tools/files_page.py

The description of a file is the first sentence of its first comment or docstring. The header describes the source of the
same name. Only the standard library is needed.
"""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "files.md"
TOP = """# Files and their contents

`make docs` writes this page from the first sentence of each file; to change a row, change that sentence. A C++ row stands
for the header and the source of one name. Modules of `python/deepspeed/runtime` only pass on names, and are left out.
[architecture.md](architecture.md) tells how the folders fit together.
"""
SKIPPED = ("_lib", "__pycache__", "runtime")


def first_sentence(comment):
    """The first sentence of the first paragraph; a table in Markdown shows ``name`` as `name`."""
    paragraph = " ".join(re.split(r"\n\s*\n", comment.strip())[0].split()).replace("``", "`").replace("|", "\\|")
    found = re.match(r"(.+?[.:])(?=\s+[A-Z\[`(]|$)", paragraph)
    return (found[1] if found else paragraph).rstrip(".:")


def comment_of(path):
    """The text at the top of a file, or ""."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return ast.get_docstring(ast.parse(text)) or ""
    lines = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        lines.append(line.lstrip("/").strip())
    return "\n".join(lines)


def rows(folder):
    """``[(names, sentence)]`` of the files that lie in ``folder`` itself."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in (".h", ".cuh", ".cpp", ".cu", ".py") and path.is_file():
            key = path.name if path.suffix == ".py" else path.stem
            found.setdefault(key, []).append(path)
    for paths in found.values():
        paths.sort(key=lambda path: (".h", ".cuh", ".cpp", ".cu", ".py").index(path.suffix))
        told = [comment for comment in map(comment_of, paths) if comment]
        yield paths, first_sentence(told[0]) if told else ""


def undescribed():
    """Files without a sentence; ``__init__.py`` may have none."""
    for folder in folders():
        for paths, sentence in rows(folder):
            if not sentence and paths[0].name != "__init__.py":
                yield paths[0].relative_to(ROOT).as_posix()


def folders():
    for top in (ROOT / "csrc", ROOT / "python" / "deepspeed"):
        found = [top, *(path for path in top.rglob("*") if path.is_dir())]
        yield from sorted(path for path in found if not {*SKIPPED} & {*path.relative_to(top).parts})


def page():
    text = [TOP]
    text.append("## Parts of an engine\n\n| part | file | what it does |\n|---|---|---|")
    text += [f"| `{name}` | `{path}` | {sentence} |" for name, path, sentence in parts()]
    text.append("")
    for folder in folders():
        table = [(paths, sentence) for paths, sentence in rows(folder) if sentence]
        if table:
            text.append(f"## {folder.relative_to(ROOT).as_posix()}\n\n| file | what it is |\n|---|---|")
            for paths, sentence in table:
                suffixes = ", ".join(path.suffix for path in paths[1:])
                text.append(f"| `{paths[0].name}`{' ' + suffixes if suffixes else ''} | {sentence} |")
            text.append("")
    return "\n".join(text).rstrip() + "\n"


def parts():
    """``[(name, path below the package, sentence)]`` of the parts of engines: classes that register themselves."""
    package = ROOT / "python" / "deepspeed"
    for path in sorted(package.glob("engine/*parts/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for call in node.decorator_list if isinstance(node, ast.ClassDef) else ():
                if isinstance(call, ast.Call) and ast.unparse(call.func) in ("engine_parts.add", "pipeline_parts.add"):
                    yield call.args[0].value, path.relative_to(package).as_posix(), first_sentence(comment_of(path))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
