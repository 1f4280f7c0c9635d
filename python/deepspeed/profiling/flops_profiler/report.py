"""The text of a flops profile."""

from deepspeed.utils.norms import is_moe_param

TITLE = "{:-^78}\n".format(" DeepSpeed Flops Profiler ")
AGGREGATED = "\n{:-^86}\n".format(" Aggregated Profile per GPU ")
DETAILED = "\n{:-^86}\n".format(" Detailed Profile per GPU ")
END = "-" * 78

_NOTATIONS = """Notations:
data parallel size (dp_size), model parallel size(mp_size),
number of parameters (params), number of multiply-accumulate operations(MACs),
number of floating-point operations (flops), floating-point operations per second (FLOPS),
fwd latency (forward propagation latency), bwd latency (backward propagation latency),
step (weights update latency), iter latency (sum of fwd, bwd and step latency)

"""
_NOTES = """Each module profile is listed after its name in the following order:
params, percentage of total params, MACs, percentage of total MACs, fwd latency, percentage of total fwd latency, \
fwd FLOPS

Note: 1. Functions that a module calls, and losses, are not modules: their MACs and latency are the module's own, and \
the
difference between its figures and the sum of those of its submodules.
2. The number of floating-point operations is that of the formulas, so FLOPS may exceed what the device can do.
3. The fwd latency of a module is measured around its forward, so that of the first one is less than the fwd latency
above, which the engine measures.

"""


_LARGE = {"G": 1e9, "M": 1e6, "k": 1e3}


def _scaled(value, units, unit=""):
    """``value`` in the largest of the ``units`` (name: factor) that it reaches; else as it is."""
    for name, factor in units.items():
        if value >= factor:
            return f"{round(value / factor, 2)} {name}{unit}"
    return f"{value} {unit}".rstrip()


def number(value):
    """``"336.23 M"``, of parameters and flops."""
    return _scaled(value, _LARGE)


def macs(value):
    """``"3139.93 GMACs"``."""
    return _scaled(value, _LARGE, "MACs")


def flops_per_second(flops, seconds):
    """``"81.9 TFLOPS"``; nothing took no time: 0."""
    return _scaled(round(flops / seconds, 2) if seconds else 0.0, {"T": 1e12, **_LARGE}, "FLOPS")


def duration(seconds):
    """``"76.67 ms"``."""
    return _scaled(round(seconds * 1e6, 2), {"s": 1e6, "ms": 1e3}, "" if seconds >= 1e-3 else "us")


def _sizes(engine):
    """(world, data-parallel, model-parallel) sizes."""
    return [getattr(engine, name, None) or 1 for name in ("world_size", "dp_world_size", "mp_world_size")]


def _params_of_model(profiler, mp_size):
    """Experts that single weights are not split of are whole on each rank."""
    shared = 0
    if mp_size > 1 and not profiler.is_expert_tensor_parallelism_enabled():
        experts = [param for param in profiler.model.parameters() if is_moe_param(param)]
        shared = sum(getattr(param, "ds_numel", param.numel()) for param in experts)
    return (profiler.params - shared) * mp_size + shared


def summary(profiler, step):
    """Totals. Lines about backward, step and batches are there where an engine has measured them."""
    engine, phases, counts = profiler.ds_engine, profiler.phases, profiler.counts
    world, dp_size, mp_size = _sizes(engine)
    flops, backward_factor = profiler.flops, 2.0 + profiler.recompute_fwd_factor
    forward = profiler.duration if phases is None else phases["forward"]
    rows = [
        ("world size", world),
        ("data parallel size", dp_size),
        ("model parallel size", mp_size),
        *([("batch size per GPU", engine.train_micro_batch_size_per_gpu())] if engine is not None else []),
        ("params per gpu", number(profiler.params)),
        ("params of model = params per GPU * mp_size", number(_params_of_model(profiler, mp_size))),
        ("fwd MACs per GPU", macs(profiler.macs).replace("MACs", "").rstrip()),
        ("fwd flops per GPU", number(flops)),
        ("fwd flops of model = fwd flops per GPU * mp_size", number(flops * mp_size)),
        ("bwd flops per GPU as counted", number(profiler.backward_flops)),
        ("recomputed flops per GPU as counted", number(profiler.recomputed_flops)),
        ("fwd latency", duration(forward)),
        *([("bwd latency", duration(phases["backward"]))] if phases is not None else []),
        ("fwd FLOPS per GPU = fwd flops per GPU / fwd latency", flops_per_second(flops, forward)),
    ]
    if phases is not None:
        backward, whole = phases["backward"], sum(phases.values())
        factor, both = (f"{one:g}" for one in (backward_factor, backward_factor + 1))
        rows += [
            (
                f"bwd FLOPS per GPU = {factor} * fwd flops per GPU / bwd latency",
                flops_per_second(backward_factor * flops, backward),
            ),
            (
                f"fwd+bwd FLOPS per GPU = {both} * fwd flops per GPU / (fwd+bwd latency)",
                flops_per_second((backward_factor + 1) * flops, forward + backward),
            ),
            ("step latency", duration(phases["step"])),
            ("iter latency", duration(whole)),
            ("samples/second", round(engine.train_micro_batch_size_per_gpu() / whole, 2)),
        ]
    if counts.not_counted:
        names = ", ".join(f"{name} ({calls})" for name, calls in sorted(counts.not_counted.items()))
        rows.append(("not counted, for want of a formula (calls)", names))
    width = max(len(name) for name, _ in rows) + 2
    lines = "".join(f"{name + ': ':<{width}}{value}\n" for name, value in rows)
    return f"{TITLE}Profile Summary at step {step}:\n{_NOTATIONS}{lines}"


class _Figures:
    """Figures of a module. A module that is not called itself, such as a list of modules, has the sums of its
    children."""

    def __init__(self, profiler, module):
        self.params = sum(profiler.parameters_of(module))
        cost = profiler.counts.costs.get(module)
        parts = [cost] if cost is not None else [_Figures(profiler, one) for one in module.children()]
        self.macs, self.flops, self.seconds = (
            sum(getattr(one, name) for one in parts) for name in ("macs", "flops", "seconds")
        )

    def line(self, whole):
        """``whole``: the figures of the model."""

        def share(name):
            return f"{getattr(self, name) / (getattr(whole, name) or 1):.2%}"

        return (
            f"{number(self.params)}, {share('params')} Params, {macs(self.macs)}, {share('macs')} MACs, "
            f"{duration(self.seconds)}, {share('seconds')} latency, {flops_per_second(self.flops, self.seconds)}, "
        )


def _by_depth(profiler):
    """Returns ``{class of modules: [params, MACs, seconds]}`` for each depth; a module that has several parents counts
    once."""
    levels, modules, seen = [], [profiler.model], set()
    while modules:
        level = {}
        for module in modules:
            figures, row = _Figures(profiler, module), level.setdefault(type(module).__name__, [0, 0, 0.0])
            row[:] = (a + b for a, b in zip(row, (figures.params, figures.macs, figures.seconds)))
        levels.append(level)
        seen.update(modules)
        children = dict.fromkeys(child for module in modules for child in module.children())
        modules = [child for child in children if child not in seen and not profiler.counts.is_ignored(child)]
    return levels


def aggregated(profiler, module_depth, top_modules):
    """The classes of modules that have most, of each depth down to ``module_depth``; -1, and beyond the model: all."""
    levels = _by_depth(profiler)
    last = len(levels) - 1 if module_depth == -1 else min(module_depth, len(levels) - 1)
    text = f"{AGGREGATED}Top {top_modules} modules in terms of params, MACs or fwd latency at different model depths:\n"
    for depth, level in enumerate(levels[: last + 1]):
        text += f"depth {depth}:\n"
        for column, (title, shown) in enumerate((("params", number), ("MACs", macs), ("fwd latency", duration))):
            best = sorted(level.items(), key=lambda item, column=column: item[1][column], reverse=True)[:top_modules]
            text += f"    {title:<11} - { {name: shown(row[column]) for name, row in best} }\n"
    return text


def _branch(profiler, module, whole, indent):
    line, children = _Figures(profiler, module).line(whole), dict(module.named_children())
    extra, name = module.extra_repr(), type(module).__name__
    if not children:
        return f"{name}({line}{extra})\n"
    inner = indent + "  "
    text = f"{name}(\n{inner}{line}{extra}\n"
    for key, child in children.items():
        ignored = profiler.counts.is_ignored(child)
        text += f"{inner}({key}): " + (
            f"{type(child).__name__}(ignored)\n" if ignored else _branch(profiler, child, whole, inner)
        )
    return f"{text}{indent})\n"


def tree(profiler):
    """A line for each module."""
    whole = _Figures(profiler, profiler.model)
    return f"{DETAILED}{_NOTES}{_branch(profiler, profiler.model, whole, '')}"
