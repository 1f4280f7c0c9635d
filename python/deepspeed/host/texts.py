"""Small files of the system."""


def read_text(path):
    """The text of a file without blanks around it; "" for one that cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().strip()
    except OSError:
        return ""
