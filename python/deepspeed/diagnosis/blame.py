"""Finds the cause of a failed step: the first bad tensor, its module and rank, and one verdict."""

import collections
import itertools
import math
import re

import torch

from deepspeed.diagnosis.bundle import BundleError
from deepspeed.diagnosis.replay import bad_kind
from deepspeed.zero.nested import tensors_in

DATA, OVERFLOW, OPERATOR, WEIGHTS = "data", "overflow", "operator", "weights or states"
EXCHANGE, SCRIPT, HARDWARE = "exchange", "script", "not repeatable (hardware)"
_FAR = 4096.0  # times the next element of a tensor: one flipped bit of an exponent does that, an update does not
_SMALL = 2.0**-6  # elements below are compared as if they were so large

# ``verdict``: one of the constants above. ``tensor``: the first bad one. ``because``: what shows it.
Verdict = collections.namedtuple("Verdict", "verdict tensor module rank because")
# A figure of the run and of the replay. ``gap``: their relative difference; 0.0 where both are inf or nan.
Row = collections.namedtuple("Row", "tensor module rank was now gap")


def blame(bundle, replay=None):
    """The ``Verdict`` of a bundle. ``replay``: a ``Replay`` of it. Without one only what shows in the files is found,
    and BundleError asks for more where that is not enough."""
    if not bundle.current:
        raise BundleError(bundle.refusal)
    kinds = {content["kind"] for content in bundle.ranks.values()}
    if kinds == {"hang"}:
        return _hang(bundle)
    if found := _bad_inputs(bundle) or _bad_values(bundle) or _unequal(bundle):
        return found
    if replay is None and "exception" not in kinds:
        why = bundle.refusal or "pass --model FILE.py:function to run the step again"
        raise BundleError(f"inputs, weights and states show no cause: {why}")
    return {"exception": _exception, "nonfinite": _nonfinite, "spike": _spike}[min(kinds)](bundle, replay)


def _module(name):
    return name.rpartition(".")[0]


def _layer(content):
    """The layer of a pipeline that ran when the content was saved."""
    return str(content["layer"]) if content["layer"] >= 0 else ""


# ---- what shows in the files -----------------------------------------------------------------------------------------
def _hang(bundle):
    """The rank that the others have waited for: it was asked, and has raised nothing; or it has left no file; or, in a
    pipeline, where an error ends every wait at once, it has heard of the error last."""
    stuck = [rank for rank, content in bundle.ranks.items() if content["kind"] == "hang" and not content["error"]]
    stuck += [rank for rank in range(bundle.first["world_size"]) if rank not in bundle.ranks]
    said = " ".join(str(content["error"]) for content in bundle.ranks.values())
    stuck += map(int, re.findall(r"rank (\d+) \(process \d+\) has not come", said))
    rank = stuck[0] if stuck else max(bundle.ranks, key=lambda one: bundle.ranks[one]["time"])
    flights = [one for content in bundle.ranks.values() for one in content["flights"] if one["state"] == "under way"]
    stacks = bundle.ranks[rank]["stacks"] if rank in bundle.ranks else "it has saved nothing"
    stage = re.search(rf"\brank {rank}: ([^;\n]+)", said)  # its position, as the errors of pipelines tell it
    where = stage[1] if stage else ["its stack is unknown", *re.split(r"\nthread ", stacks)[0].splitlines()][-1]
    layer = re.search(r"^layer (\d+)", where)
    module = layer[1] if layer else _layer(bundle.ranks[rank]) if rank in bundle.ranks else ""
    waits = flights[-1]["call"] if flights else bundle.first["error"]
    why = f"the others have waited for this rank: {where}"
    return Verdict(SCRIPT, waits, module, rank, why)


def _bad_inputs(bundle):
    for rank, content in bundle.ranks.items():
        for number, one in enumerate(content["micro_batches"]):
            for tensor in tensors_in((one["inputs"], one["kwargs"], one["more"])):
                if kind := bad_kind(tensor, masks=True):
                    return Verdict(DATA, f"input of micro-batch {number}", "", rank, f"the script gave forward {kind}")
    return None


def _bad_values(bundle):
    """States before the weights that an update makes of them; bad gradients would have failed the step before."""
    values = [
        (kind in ("fp32", "weight"), rank, kind, name, tensor)
        for rank, content in bundle.ranks.items()
        for (kind, name), tensor in itertools.chain(
            ((key[:2], tensor) for key, tensor in content["states"].items()),
            ((("weight", name), tensor) for name, (_, tensor) in content["weights"].items()),
        )
    ]
    for _, rank, kind, name, tensor in sorted(values, key=lambda value: value[0]):
        if why := _damage(kind, tensor):
            what = {"fp32": "master", "weight": "weight"}.get(kind, f"state {kind}")
            return Verdict(WEIGHTS, f"{what} of '{name}'", _module(name), rank, why)
    return None


def _damage(kind, tensor):
    """The reason why a tensor cannot be what training made; None if it can."""
    if bad := bad_kind(tensor):
        return f"it has {bad}"
    flat = tensor.reshape(-1).double()
    if kind.endswith("exp_avg_sq") and bool((flat < 0).any()):
        return f"a mean of squares is {flat.min().item():.6g} at element {int(flat.argmin())}"
    largest, *others = [*flat.abs().topk(min(2, flat.numel())).values.tolist(), 0.0, 0.0]
    if largest > _FAR * max(_SMALL, *others):
        return f"element {int(flat.abs().argmax())} has the size {largest:.6g}, and the next one {max(others):.6g}"
    return None


def _unequal(bundle):
    """Weights that are not those of the masters, or of the first rank that holds copies."""
    for rank, content in bundle.ranks.items():
        masters = [(key[1], key[2] or 0, tensor) for key, tensor in content["states"].items() if key[0] == "fp32"]
        copies = bundle.ranks.get(content["dp_ranks"][0], content)["weights"]
        for name, begin, other in [*masters, *((name, *known) for name, known in copies.items())]:
            first, mine = content["weights"].get(name, (begin, other[:0]))
            start, end = max(begin, first), min(begin + other.numel(), first + mine.numel())
            mine, other = mine.reshape(-1)[start - first : end - first], other.reshape(-1)[start - begin : end - begin]
            if end > start and not torch.equal(mine, other.to(mine.dtype)):
                why = f"its elements {start} to {end} are not those of its master or of rank {content['dp_ranks'][0]}"
                return Verdict(WEIGHTS, f"weight '{name}'", _module(name), rank, why)
    return None


# ---- what a replay shows ---------------------------------------------------------------------------------------------
def compare(bundle, replay):
    """``(passes, rows)``: what each rank has computed again, and a ``Row`` for each loss and each figure of a reduced
    gradient that was saved, losses first."""
    passes = {rank: replay.run(rank) for rank in bundle.ranks}
    figures, losses, gradients = replay.figures(passes), [], []
    for rank, content in bundle.ranks.items():
        saved = [one["loss"].item() for one in content["micro_batches"] if one["loss"] is not None]
        for number, (was, now) in enumerate(zip(saved, passes[rank].losses)):
            losses.append(Row(f"loss of micro-batch {number}", "", rank, was, now, _gap(was, now, now)))
        for (name, begin, numel), (norm, total) in content["gradients"].items() if figures[rank] else ():
            if (name, begin, numel) not in figures[rank]:
                raise BundleError(
                    f"rank {rank}: the replay has no piece of the gradient of {name!r} with {numel} elements from "
                    f"{begin} on. Does --model make the model of the run, on as many ranks?"
                )
            (now, sum_now), what = figures[rank][name, begin, numel], f"reduced gradient of '{name}'"
            gap = max(_gap(norm, now, now), _gap(total, sum_now, now))
            gradients.append(Row(what, _module(name), rank, norm, now, gap))
    return passes, losses + gradients


def _gap(was, now, size):
    if was == now or not (math.isfinite(was) or math.isfinite(now)):
        return 0.0
    gap = abs(was - now) / max(abs(size), 1e-30)
    return gap if math.isfinite(gap) else math.inf


def _differing(bundle, rows, verdict, why):
    """The verdict of the first of the rows in which the replay differs from the run; None if there is none."""
    for row in rows:
        if row.gap > bundle.first["tolerance"]:
            told = f"it was {row.was:.9g}, and {why} give {row.now:.9g}"
            return Verdict(verdict, row.tensor, row.module, row.rank, told)
    return None


def _exception(bundle, replay):
    """The first rank that raised it, as the others may have waited for that one."""
    content = min((one for one in bundle.ranks.values() if one["error"]), key=lambda one: one["time"])
    rank, module = content["rank"], _layer(content)
    why = "the model runs through on the same micro-batches and weights"
    why = why if replay is not None else f"the step was not run again: {bundle.refusal or 'there was no --model'}"
    where = [line.strip() for line in content["traceback"].splitlines() if line.strip().startswith("File ")][-1]
    if replay is not None and (replay.run(rank).error or "").startswith(content["error_type"] + ":"):
        others = replay.run(rank, others=True)
        if others.error is None and others.losses:
            why = f"{content['error']} ({where}); the same weights run through on other micro-batches"
            return Verdict(DATA, f"micro-batch {len(content['micro_batches']) - 1}", module, rank, why)
        why = "other micro-batches raise an error, too, or there are none"
    return Verdict(SCRIPT, "none", module, rank, f"{content['error']} ({where}); {why}")


def _losses(bundle, replay):
    """``(passes, rows, rows of losses, verdict)``: a verdict where a loss is not repeated, else None."""
    passes, rows = compare(bundle, replay)
    for rank, one in passes.items():
        if one.error is not None:
            raise BundleError(
                f"rank {rank}: the replay raises what the run did not: {one.error}. Is --model the model?"
            )
    losses = [row for row in rows if row.tensor.startswith("loss ")]
    why = "the same weights, data and random numbers"
    return passes, rows, losses, _differing(bundle, losses, HARDWARE, why)


def _nonfinite(bundle, replay):
    passes, rows, _, found = _losses(bundle, replay)
    if found is not None:
        return found
    bad = [(one.first[2], rank) for rank, one in passes.items() if one.first is not None]
    if bad:  # a cut model hands it on to other ranks
        rank = min(bad)[1]
        tensor, module, _ = passes[rank].first
        narrow = bundle.first["loss_scale"] != 1.0 or any(
            w.element_size() == 2 for _, w in bundle.first["weights"].values()
        )
        wide = replay.run(rank, dtype=torch.float32) if narrow else None
        if narrow and wide.first is None and wide.error is None:
            return Verdict(OVERFLOW, tensor, module, rank, "the same step is finite in fp32 without a loss scale")
        return Verdict(OPERATOR, tensor, module, rank, "it is computed of finite inputs and weights, again and again")
    for rank, content in bundle.ranks.items():
        for name in content["local_nonfinite"]:
            why = "autograd made it inf or nan on this rank, and the same step does not make it again"
            return Verdict(HARDWARE, f"gradient of '{name}'", _module(name), rank, why)
    found = _differing(bundle, rows, EXCHANGE, "the gradients of all ranks, which were finite,")
    why = f"the norm was {bundle.first['norm']}, and the gradients of all ranks are finite, then and now"
    return found or Verdict(EXCHANGE, "a reduced gradient", "", bundle.first["rank"], why)


def _spike(bundle, replay):
    _, _, losses, found = _losses(bundle, replay)
    if found is not None:
        return found
    worst = max(losses, key=lambda row: row.now)
    content = bundle.ranks[worst.rank]
    others = replay.run(worst.rank, others=True).losses
    if others and min(others) > content["spike_factor"] * content["usual_loss"]:
        why = f"other micro-batches have losses of {others}, too, not {content['usual_loss']:.6g}"
        return Verdict(WEIGHTS, "the weights as a whole", "", worst.rank, why)
    why = f"{worst.tensor} is {worst.now:.6g}; with the same weights others have {others}"
    return Verdict(DATA, worst.tensor.removeprefix("loss of "), "", worst.rank, why)
