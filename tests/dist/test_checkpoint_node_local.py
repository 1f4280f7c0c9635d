"""Every node a disk of its own: what a node lacks for loading comes from the others."""

import os

import pytest

from deepspeed.checkpoint.write import verify
from engine_models import loss_on, net_engine
from harness import on_ranks
from runs import together, train


@pytest.mark.parametrize("saved, loaded", [(0, 0), (2, 2), (3, 3), (3, 1)])
@on_ranks(4)
def test_every_node_its_own_disk(rank, world, saved, loaded, folder):
    os.environ["CROSS_RANK"] = str(rank // 2)  # two nodes of two ranks
    disk = os.path.join(folder, f"disk{rank // 2}")
    on_nodes = {"use_node_local_storage": True}

    def loss_at(step, micro):
        return loss_on(engine, step)

    engine = net_engine(world, saved, checkpoint=on_nodes)
    train(engine, loss_at, 2)
    engine.save_checkpoint(disk)
    straight = train(engine, loss_at, 2)
    files = sorted(verify.read(os.path.join(disk, "global_step2"))["files"])
    assert verify.verify_folder(os.path.join(disk, "global_step2")) == []
    engine = net_engine(world, loaded, checkpoint=on_nodes)
    path, _ = engine.load_checkpoint(disk)
    assert path.startswith(disk)
    results = together(files, sorted(os.listdir(disk)), straight == train(engine, loss_at, 2))
    for rank, (files, entries, equal) in enumerate(results):
        node = rank // 2
        assert entries == ["global_step2", "latest"] + ["zero_to_fp32.py"] * (saved > 0)
        own = [f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (2 * node, 2 * node + 1)] if saved else []
        assert [name for name in files if "optim_states" in name] == own
        assert equal or saved != loaded
