"""Python's cyclic garbage collection during training (``disable_python_gc``)."""

import gc

from deepspeed.engine.members import Part, engine_parts, member


@engine_parts.add("python_gc")
class PythonGC(Part):
    """Switches the collector of the process off while the engine lives: its pauses differ by rank, and ranks wait."""

    _switched_off = False

    def start(self):
        if self.engine._config.disable_python_gc and gc.isenabled():
            gc.disable()
            self._switched_off = True

    def stop(self):
        if self._switched_off:
            gc.enable()
            self._switched_off = False

    @member
    def collect_python_gc(self):
        """Collects now, for scripts that choose the moment; returns the number of unreachable objects."""
        return gc.collect()
