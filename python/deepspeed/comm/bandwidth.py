"""Bandwidths of operations (csrc/comm/boards/call_figures.h). ``bandwidths(name, size_bytes, ms, ranks)`` is
``(algorithm bandwidth, bus bandwidth)`` in Gbit/s; ``size_bytes``: of the input of a rank. ``readable_size(bytes)``:
1.5 MB."""

from deepspeed import _native

bandwidths = _native._C.bandwidths
readable_size = _native._C.readable_size
