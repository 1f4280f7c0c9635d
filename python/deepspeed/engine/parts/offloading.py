"""Reports about states that rest elsewhere: their tiers, transfers and waits."""

import time

from deepspeed.engine.members import engine_parts, member
from deepspeed.zero.offload.rates import tier_rate

_NOTEWORTHY = 0.1  # of the time


@engine_parts.add("_offloading")
class Offloading:
    """A part of the engine."""

    def __init__(self, engine):
        self.engine = engine
        self._since, self._before, self._steps = time.perf_counter(), {}, 0
        self._waited = {}  # by tier, up to the last events

    @member
    def offload_report(self, reset=False):
        """The transfers of this rank's memory tiers since the engine was made, or since the last call with ``reset``.

        Returns a dict: ``seconds`` and ``steps`` that have passed; ``tiers``, by name ("device", "host", "file"):
        ``resting_bytes``, ``held_bytes`` (with copies on their way) and ``peak_bytes`` now, ``read_bytes`` and
        ``written_bytes`` of what rests there and was worked on elsewhere, ``read_gb_per_s`` and ``write_gb_per_s``
        while that went on, ``share_of_rate`` that is of what the tier reaches here (measured once on a machine; None
        where nothing moved), ``waited_ms`` in which training stood still for it, and ``waited_share`` of all time;
        ``advice``: a sentence for each setting that costs more than 10 % of the time; ``strategy``: counts of
        ``super_offload`` or ``zenflow`` since the engine was made, and the ms that steps have waited for their threads,
        whose own waits for memory count in ``waited_ms``, too.
        """
        core = self.engine.core
        if core is None:
            return {"seconds": 0.0, "steps": 0, "tiers": {}, "advice": [], "strategy": {}}
        found, now = core.storage.report(), time.perf_counter()
        seconds, tiers = now - self._since, {}
        for name, row in found["media"].items():
            moved = {key: row[key] - self._before.get((name, key), 0) for key in row if key.endswith(_COUNTED)}
            tiers[name] = {
                **{key: row[key] for key in ("resting_bytes", "held_bytes", "peak_bytes", "over_budget")},
                "read_bytes": moved["read_bytes"],
                "written_bytes": moved["written_bytes"],
                "read_gb_per_s": _rate(moved["read_bytes"], moved["read_seconds"]),
                "write_gb_per_s": _rate(moved["written_bytes"], moved["write_seconds"]),
                "share_of_rate": self._share_of_rate(name, moved),
                "waited_ms": moved["waited_seconds"] * 1e3,
                "waited_share": moved["waited_seconds"] / seconds if seconds > 0 else 0.0,
            }
        steps = self.engine.gas_boundary_ctr - self._steps
        if reset:
            self._since, self._steps = now, self.engine.gas_boundary_ctr
            self._before = {(name, key): row[key] for name, row in found["media"].items() for key in row}
        return {
            "seconds": seconds,
            "steps": steps,
            "tiers": tiers,
            "advice": self._advice(tiers),
            "strategy": core.strategy_figures(),
        }

    def _share_of_rate(self, tier, moved):
        seconds = moved["read_seconds"] + moved["write_seconds"]
        if tier == "device" or seconds <= 0:
            return None
        sections = [self.engine.zero_offload_optimizer()]
        if self.engine.zero_optimization_partition_weights():  # elsewhere offload_param has no effect
            sections.append(self.engine.zero_offload_param())
        rate = tier_rate(tier, self.engine.device, sections)
        return rate and (moved["read_bytes"] / rate[0] + moved["written_bytes"] / rate[1]) / seconds

    def figures(self):
        """(event, value) of a step for a monitor: for each tier in which states rest, apart from the device, the
        milliseconds in which training waited for it since the last call."""
        core = self.engine.core
        for name, row in core.storage.report()["media"].items() if core is not None else ():
            if name != "device" and row["resting_bytes"]:
                waited = row["waited_seconds"] * 1e3
                yield f"Train/Offload/waited_ms_{name}", waited - self._waited.get(name, 0.0)
                self._waited[name] = waited

    def _advice(self, tiers):
        section, advice = self.engine.zero_offload_optimizer(), []
        waits = tiers.get("file", {}).get("waited_share", 0.0)
        if section is not None and waits > _NOTEWORTHY:
            missing = [key for key in ("pipeline_read", "pipeline_write") if not getattr(section, key)]
            what = f"set {' and '.join(missing)} to true" if missing else "the drive is the limit: lower ratio"
            advice.append(f"{waits:.0%} of the time went into waiting for {section.nvme_path}: {what}")
        return advice


_COUNTED = ("read_bytes", "written_bytes", "seconds")


def _rate(size, seconds):
    return size / seconds / 1e9 if seconds > 0 else None
