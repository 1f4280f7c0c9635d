"""Metrics in CSV files, one for each name of an event."""

import contextlib
import csv
import errno
import io
import os
import shutil
import tempfile

from deepspeed.monitor.monitor import Monitor, checked, folder_of

_LONGEST_ROW = 4096
_TABLES = ".deepspeed_tables"


class csvMonitor(Monitor):
    """``output_path/job_name/<name of the event>.csv`` with the header ``step,<last part of the name>``; ``/`` and
    spaces of the name become ``_``. Rows are appended whole, and at once.

    The file ``.deepspeed_tables`` beside them lists the tables that monitors have made. A resumed run takes rows of
    later steps out of these alone: other files of the folder belong to somebody else."""

    def __init__(self, csv_config):
        super().__init__(csv_config)
        self.output_path, self.job_name = csv_config.output_path, csv_config.job_name
        self._opened = set()  # files whose last row is known to be whole
        self.log_dir = self.setup_log_dir()

    def setup_log_dir(self, base=os.path.join(os.path.expanduser("~"), "csv_monitor")):
        """Makes the folder of the files and returns it, on rank 0 of a monitor that is on."""
        return folder_of("csv_monitor", self, base) if self.writes else None

    def write_events(self, event_list):
        rows = {}
        for name, value, step in checked(event_list) if self.writes else ():
            rows[name] = rows.get(name, "") + f"{step},{value}\n"
        for name, text in rows.items():
            self._append(name, text)

    def _append(self, name, rows):
        path = os.path.join(self.log_dir, name.replace("/", "_").replace(" ", "_") + ".csv")
        with open(path, "ab+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if path not in self._opened:
                self._opened.add(path)
                size = _drop_half_row(file, size) if os.path.isfile(path) else size
            if size == 0:
                self._note_table(os.path.basename(path))
            _write_whole(file, size, ((_header(name) if size == 0 else "") + rows).encode(), path)

    def _note_table(self, name):
        if name not in self._tables():
            path = os.path.join(self.log_dir, _TABLES)
            with open(path, "ab", buffering=0) as file:
                _write_whole(file, file.tell(), os.fsencode(name) + b"\n", path)

    def _tables(self):
        """Names of the tables that monitors have made. Runs before there was a list have made those of the engine."""
        there = {name for name in os.listdir(self.log_dir) if name.endswith(".csv")}
        found = {name for name in there if name.startswith("Train_Samples_")}
        with contextlib.suppress(FileNotFoundError), open(os.path.join(self.log_dir, _TABLES), "rb") as file:
            found.update(there.intersection(os.fsdecode(line) for line in file.read().splitlines()))
        return found

    def resume(self, step):
        """Removes the rows of later steps from the tables of monitors."""
        for name in sorted(self._tables()) if self.writes else ():
            path = os.path.realpath(os.path.join(self.log_dir, name))  # a link stays one
            if os.path.isfile(path):
                _remove_later_rows(path, step)


def _remove_later_rows(path, step):
    with open(path, "rb") as file:
        head, *rows = file.readlines() or [b""]
    kept = [row for row in rows if row.endswith(b"\n") and _step_of(row) <= step]
    if not head.startswith(b"step,") or len(kept) == len(rows):
        return
    handle, made = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(path))
    try:
        with open(handle, "wb") as file:
            file.writelines([head, *kept])
        shutil.copymode(path, made)
        os.replace(made, path)
    except BaseException:
        os.unlink(made)
        raise


def _write_whole(file, size, data, path):
    """Appends ``data`` to a file of ``size`` bytes, or nothing where it does not fit on the disk."""
    try:
        if file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    except OSError:
        file.truncate(size)
        raise


def _header(name):
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(["step", name.split("/")[-1]])
    return text.getvalue()


def _drop_half_row(file, size):
    """Cuts off what follows the last end of a row: a process may have been killed while it wrote. Returns the size."""
    tail = file.seek(max(0, size - _LONGEST_ROW))
    return file.truncate(tail + file.read().rfind(b"\n") + 1)


def _step_of(row):
    try:
        return float(row.split(b",")[0])
    except ValueError:
        return float("-inf")  # not a row of ours
