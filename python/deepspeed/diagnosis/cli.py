"""``ds_postmortem``: a failed step that the section ``postmortem`` has saved.

ds_postmortem show DIR                          what is in it
ds_postmortem replay DIR --model FILE.py:make   runs it again and compares losses and gradients with those of the run
ds_postmortem blame DIR --model FILE.py:make    names the first bad tensor, its module and rank, and the cause
"""

import argparse

from deepspeed.diagnosis.blame import blame, compare
from deepspeed.diagnosis.bundle import Bundle, BundleError
from deepspeed.diagnosis.ranks import RanksReplay
from deepspeed.diagnosis.replay import Replay, forward_loss, function_of
from deepspeed.host.command_line import program


def replay_lines(bundle, replay):
    """The lines of ``replay``: its losses and gradients beside those of the run."""
    passes, rows = compare(bundle, replay)
    for rank, one in passes.items():
        yield f"rank {rank}: losses {one.losses}, first inf or nan: {one.first and one.first[:2]}, error: {one.error}"
    for what in ("loss", "reduced gradient"):
        gaps = [row.gap for row in rows if row.tensor.startswith(what)]
        told = f"within {max(gaps, default=0.0):.3g} of those of the run" if any(gaps) else "bitwise those of the run"
        yield f"{what}: {told if gaps else 'none was saved'}"


@program("ds_postmortem")
def main(given=None):
    parser = argparse.ArgumentParser("ds_postmortem", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=("show", "replay", "blame"))
    parser.add_argument("folder", metavar="DIR", help="a folder ...-stepNNNNNNNN in postmortem.dir")
    parser.add_argument("--model", metavar="FILE.py:FUNCTION", help="returns the model, as the script builds it")
    more = "(model, arguments of forward, values of keep_for_postmortem) -> loss; without it the model returns the loss"
    parser.add_argument("--step", metavar="FILE.py:FUNCTION", help=more)
    chosen = parser.parse_args(given)
    bundle, replay = Bundle(chosen.folder), None
    if chosen.command == "replay" and not chosen.model:
        raise BundleError("replay needs --model FILE.py:function, which returns the model as the script builds it")
    if chosen.command != "show" and chosen.model and not (chosen.command == "blame" and bundle.refusal):
        if bundle.cut:
            replay = RanksReplay(bundle, chosen.model, chosen.step)
        else:
            step = function_of(chosen.step, "--step") if chosen.step else forward_loss
            replay = Replay(bundle, function_of(chosen.model, "--model"), step)
    if chosen.command == "blame":
        lines = (f"{name}: {value}" for name, value in blame(bundle, replay)._asdict().items())
    else:
        lines = bundle.lines() if chosen.command == "show" else replay_lines(bundle, replay)
    print("\n".join(lines))
    return 0
