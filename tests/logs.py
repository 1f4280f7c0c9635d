"""The lines that the library logs while a test looks."""

import contextlib
import logging

from deepspeed import log


@contextlib.contextmanager
def logged(level=logging.NOTSET):
    """The list of the texts that are logged in the meantime, from ``level`` on. What is said once in a process is said
    again, as the process may have run other tests."""
    texts = []
    log._said.clear()
    handler = logging.Handler(level)
    handler.emit = lambda record: texts.append(record.getMessage())
    log.logger.addHandler(handler)
    try:
        yield texts
    finally:
        log.logger.removeHandler(handler)
