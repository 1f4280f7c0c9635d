"""Before anything of a checkpoint is loaded: is it the one that was saved?"""

import errno

from deepspeed.checkpoint import manifest, verify
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.log import logger


def check(engine, folder):
    """Compares ``folder`` with its manifest as ``checkpoint.verify_on_load`` says. Raises RuntimeError on all ranks,
    naming file and tensor. Every rank calls it: they share the reading of "all"."""
    mode = engine._config.checkpoint_config.verify_on_load
    if mode == "none":
        return
    ranks = Ranks(engine, engine._config.use_node_local_storage)
    error = None
    try:
        problems = _problems(folder, mode, ranks)
        if problems:
            text = "; ".join(str(problem) for problem in problems[:5])
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            missing = any("is missing" in str(problem) for problem in problems)
            error = FileNotFoundError(errno.ENOENT, text + more) if missing else RuntimeError(text + more)
    except manifest.DamagedManifest as caught:
        error = caught
    ranks.agree(
        error, f"the checkpoint {folder} is damaged, nothing is loaded (ds_ckpt ls lists older ones, tag= loads one)"
    )


def _problems(folder, mode, ranks):
    facts = manifest.read(folder)
    if facts is None:
        if mode == "all":
            logger.warning(f"{folder} has no manifest: its files are not compared with what was saved")
        return []
    short = manifest.missing_or_short(folder, facts) if ranks.leads else []
    if short or mode == "sizes":
        return short
    beside = [rank for rank in range(ranks.size) if ranks.nodes[rank] == ranks.node]
    files = sorted(facts["files"])[beside.index(ranks.rank) :: len(beside)]
    return verify.verify_folder(folder, only=set(files), threads=1)
