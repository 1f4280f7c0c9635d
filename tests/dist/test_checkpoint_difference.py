"""``ds_ckpt diff``: equal across stages and ranks, and every difference named."""

import deepspeed
from deepspeed.checkpoint.read.cli import main
from engine_models import loss_on, net_engine
from harness import run_ranks
from runs import train


def body(rank, world, folder, stage, change):
    engine = net_engine(world, stage)
    # The same batch on every rank: the same gradients at any number of ranks.
    train(engine, lambda step, _: loss_on(engine, step), 2)
    name, param = next(iter(engine.module.named_parameters()))
    if change:
        value = deepspeed.utils.safe_get_full_fp32_param(param)
        value.view(-1)[3] += 0.5
        deepspeed.utils.safe_set_full_fp32_param(param, value)
        engine.optimizer.update_lp_params()
    engine.save_checkpoint(folder)
    return name


def test_equal_across_stages_and_ranks_and_every_difference_is_named(tmp_path, capsys):
    one, two, three = (str(tmp_path / name) for name in ("one", "two", "three"))
    run_ranks(1, body, one, 2, False)
    run_ranks(2, body, two, 3, False)
    name = run_ranks(2, body, three, 1, True)[0]
    assert main(["diff", one, two]) == 0
    out = capsys.readouterr().out
    assert "the same parameters" in out, out
    assert main(["diff", one, f"{three}/global_step2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(f"{name}: 1 of" in line and "at most 0.5" in line for line in lines), lines
    assert main(["diff", one, str(tmp_path)]) == 2
    assert "names one" in capsys.readouterr().err
