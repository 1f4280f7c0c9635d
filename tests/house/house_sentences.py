"""Rules about sentences: how comments, docstrings and the sentences of pages begin, and what messages say."""

import ast
import io
import re
import tokenize

from house_cpp import SUFFIXES
from sentences import listed

SEE = "See docs/adding.md (sentences) and tests/house/house_sentences.py."
CLAUSE = re.compile(r"(Of|Who|Whom|Whose|What|Which|How|Why)\b")
# "Where nothing rests, ..." is a condition in front of a sentence; without its comma it is a clause that stands alone.
CONDITION = re.compile(r"(When|Where)\b[^,]*?(?:[.:;]\s|[.:;]?$)")
DENIAL = re.compile(r"(?<![Tt]here )\b(?:is|are|was|were) no (?!longer\b|more\b|other\b)")
LITERAL = re.compile(r'R"(?P<tag>[^(\s]*)\((?P<raw>.*?)\)(?P=tag)"|(?<!\')"(?P<text>(?:\\.|[^"\\\n])*)"', re.S)


# ---- comments --------------------------------------------------------------------------------------------------------


def comments(path, text):
    """(line, text) of each comment and docstring; comments on lines of their own that follow each other are one."""
    return _python_comments(text) if path.endswith(".py") else _cpp_comments(text)


def _cpp_comments(text):
    lines = _without_literals(text).splitlines()
    found = [(number, *match.groups()) for number, line in enumerate(lines, 1) if (match := COMMENT.match(line))]
    return _joined([(number, not before.strip(), comment.strip()) for number, before, comment in found])


COMMENT = re.compile(r"(.*?)//+[!<]?(.*)$")


def _without_literals(text):
    return LITERAL.sub(lambda match: '""' + "\n" * match.group().count("\n"), text)


def _python_comments(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, docstring
    found, lines = [], text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            number, column = token.start
            found.append((number, not lines[number - 1][:column].strip(), token.string.lstrip("#").strip()))
    yield from _joined(found)


def _joined(found):
    """Rows (line, whether the comment has the line for itself, text) as comments."""
    first, last, words = 0, -1, []
    for number, alone, comment in found:
        if words and alone and number == last + 1:
            words.append(comment)
        else:
            if words:
                yield first, " ".join(words)
            first, words = number, [comment]
        last = number if alone else -1
    if words:
        yield first, " ".join(words)


def begins_with_a_clause(comment):
    return CLAUSE.match(comment) or CONDITION.match(comment)


@listed
def check_beginnings(files):
    """``files``: {path: text} of sources."""
    for path, text in files.items():
        for line, comment in comments(path, text) if path.endswith((".py", *SUFFIXES)) else ():
            if begins_with_a_clause(comment):
                yield (
                    f"{path}:{line} begins with '{comment[:50]}': a comment begins with what the code is or does, in "
                    f"words of its own: 'Returns ...', 'Number of ...', 'The tensors that ...'. {SEE}"
                )


# ---- pages -----------------------------------------------------------------------------------------------------------

MARK = r"(?:[-*]|\d+\.)\s+"  # in front of an item of a list
SENTENCE = re.compile(r"(?<=[.!?])[)\"'*_]*\s+(?=[\w(\"'*_\[`])")
CELL = re.compile(r"(?<!\\)\|")


def page_sentences(text):
    """(line, sentence) of a page in Markdown, without headings, which are titles, and without code."""
    text = re.sub(r"^(\s*)```.*?^\s*```", lambda block: "\n" * block.group().count("\n"), text, flags=re.M | re.S)
    for number, block in _blocks(text):
        start = 0
        for end in [*(found.end() for found in SENTENCE.finditer(block)), len(block)]:
            sentence = block[start:end].strip()
            if sentence:
                yield number + block.count("\n", 0, start), " ".join(sentence.lstrip("*_([\"'").split())
            start = end


def _blocks(text):
    """(line, text) of each paragraph, item of a list and cell of a table."""
    first, lines = 0, []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        item = re.match(rf"\s*{MARK}", line)
        alone = not line.strip() or line.startswith(("#", "|")) or (line.startswith("    ") and not lines and not item)
        if lines and (alone or item):
            yield first, "\n".join(lines)
            lines = []
        if line.startswith("|"):
            yield from ((number, cell.strip()) for cell in CELL.split(re.sub(r"`[^`]*`", "``", line)) if cell.strip())
        elif not alone:
            first = first if lines else number
            lines.append(line[item.end() if item else 0 :])


@listed
def check_pages(pages):
    """``pages``: {path: text} of pages in Markdown. A question may begin with its question word."""
    for path, text in pages.items():
        for line, sentence in page_sentences(text):
            if begins_with_a_clause(sentence) and not sentence.endswith("?"):
                yield (
                    f"{path}:{line} begins a sentence with '{sentence[:50]}': a sentence begins with its subject, or "
                    f"with a condition and a comma. {SEE}"
                )
            denial = DENIAL.search(sentence)
            if denial:
                yield f"{path}:{line} says '{denial.group()}' in '{sentence[:70]}': a page says 'is not a'. {SEE}"


# ---- messages --------------------------------------------------------------------------------------------------------


def literals(path, text):
    """(line, text) of each string in code."""
    if path.endswith(".py"):
        tree = ast.parse(text)
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and ast.get_docstring(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield node.lineno, node.value
    else:
        code = re.sub(r"^([^\"\n]*?)//[^\n]*", r"\1", text, flags=re.M)
        for match in LITERAL.finditer(code):
            yield code.count("\n", 0, match.start()) + 1, match["raw"] or match["text"] or ""


@listed
def check_denials(files):
    for path, text in files.items():
        for line, message in literals(path, text) if path.endswith((".py", *SUFFIXES)) else ():
            found = DENIAL.search(message)
            if found:
                yield (
                    f"{path}:{line} says '{message[max(found.start() - 20, 0) : found.end() + 20]}': a message says "
                    f"'is not a', which every reader knows. {SEE}"
                )


@listed
def check_so_many(files):
    """``files``: {path: text} of sources and pages."""
    for path, text in files.items():
        for found in re.finditer(r'(?<!")\bso\s+many\b(?!\s+\w+\s+that\b)', text):
            yield (
                f"{path}:{text.count(chr(10), 0, found.start()) + 1} says 'so many' and does not give a number: write "
                f"'this many', or the name of the number. {SEE}"
            )
