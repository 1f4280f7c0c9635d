"""The page of charts about a run, which rank 0 writes when the run ends."""

import weakref

from deepspeed.engine import checks
from deepspeed.engine.members import Part, engine_parts
from deepspeed.log import logger
from deepspeed.profiling.report import write_report


@engine_parts.add("_run_report", order=1)  # behind the step log, whose last line is then written
class RunReport(Part):
    """A part of the engine. The run ends with ``destroy()``, with the last reference to the engine, or with the
    program, whatever is first."""

    _end = None

    def start(self):
        engine, path = self.engine, self.engine._outputs.paths.get("report.path")
        if path is None:
            return
        checks.check_file(engine, path, "report.path")
        if engine.global_rank == 0:
            self._end = weakref.finalize(engine, _write, engine._outputs.paths["step_log.file"], path)

    def stop(self):
        if self._end is not None:
            self._end()


def _write(lines, path):
    try:
        write_report(lines, path)
    except OSError as error:
        logger.warning(
            "report.path: %s. The page can be made later: python -m deepspeed.profiling.report %s", error, lines
        )
