"""Parts that all programs of this package share: exit codes, arguments, and outputs that are tried before work
begins."""

import functools
import os
import signal
import sys

MOST_SLOTS = 1 << 16


class _OutputError(Exception):
    """Standard output cannot be written; the argument is the OSError."""


class _Output:
    """Standard output whose errors can be told from those of other files."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, text):
        try:
            return self._stream.write(text)
        except OSError as error:
            raise _OutputError(error) from error

    def flush(self):
        try:
            self._stream.flush()
        except OSError as error:
            raise _OutputError(error) from error


def program(name, code=1):
    """Makes ``main(args=None)`` the program ``name``: it returns an exit code, and no error is a traceback.

    An OSError, ValueError, RuntimeError or MemoryError becomes one line on stderr and the exit code ``code``, as does a
    standard output that cannot be written (a full disk). After Ctrl-C the exit code is 130, and 141 where the reader of
    standard output has gone, as for programs that a signal ends.
    """

    def decorate(main):
        @functools.wraps(main)
        def run(args=None):
            stream, sys.stdout = sys.stdout, _Output(sys.stdout)
            try:
                try:
                    result = main(args)
                finally:
                    sys.stdout.flush()
                return result
            except _OutputError as error:
                return _without_output(name, code, stream, error.args[0])
            except KeyboardInterrupt:
                _tell(f"{name.split(':')[0]}: interrupted")
                return 128 + signal.SIGINT
            except MemoryError:
                _tell(f"{name}: there is not enough memory")
            except OSError as error:
                where = f"{error.filename}: " if error.filename is not None else ""
                _tell(f"{name}: {where}{error.strerror or error}")
            except (ValueError, RuntimeError) as error:
                _tell(f"{name}: {error}")
            finally:
                sys.stdout = stream
            return code

        return run

    return decorate


def _tell(text):
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass  # nobody can be told


def _without_output(name, code, stream, error):
    # The interpreter writes what is left in the buffer when it ends: that goes nowhere.
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass  # a stream without a file
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    _tell(f"{name}: standard output cannot be written: {error.strerror}")
    return code


def check_output(path, option):
    """Raises OSError that names ``option`` if the file ``path`` cannot be written. The content of the file stays; a file
    that did not exist does not exist afterwards either. None: there is no output."""
    if path is None:
        return
    existed = os.path.lexists(path)
    try:
        with open(path, "ab"):
            pass
        if not existed:
            os.remove(path)
    except OSError as error:
        raise OSError(f"{option} {path}: the file cannot be written: {error.strerror}") from error


def check_slots(count, source):
    """Raises ValueError that names ``source`` if a host cannot have ``count`` slots."""
    if count > MOST_SLOTS:
        raise ValueError(f"{source} is {count}; a host has at most {MOST_SLOTS} slots, one for each rank.")
