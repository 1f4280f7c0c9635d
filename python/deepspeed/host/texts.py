"""Small texts: files of the system, and tables for people."""


def read_text(path):
    """The text of a file without blanks around it; "" for one that cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().strip()
    except OSError:
        return ""


def table(rows):
    """The lines of a table of ``rows`` of cells, whose columns stand below each other."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
