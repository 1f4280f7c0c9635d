"""Names that clients import at module level, and what they do between ranks."""

import gc
import os

import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.launcher import runner
from deepspeed.runtime.pipe import engine, p2p, schedule
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero.mics_utils import create_mics_comm_groups, scale_tensors
from harness import run_ranks
from logs import logged
from refusals import refused


def test_names_of_gpt_neox():
    checkpointing = deepspeed.checkpointing
    assert checkpointing._CUDA_RNG_STATE_TRACKER is checkpointing.get_cuda_rng_tracker()
    assert checkpointing._MODEL_PARALLEL_RNG_TRACKER_NAME == "model-parallel-rng"
    state = torch.get_rng_state()
    first = torch.rand(3)
    checkpointing._set_cuda_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    assert runner.DLTS_HOSTFILE == "/job/hostfile"
    assert schedule._is_even(4) and schedule._is_odd(3) and not schedule._is_odd(0)
    assert engine.TRAIN_BATCH_TIMER == "train_batch" and engine.PIPE_SEND_GRAD_TIMER == "pipe_send_grad"


def test_multi_tensor_apply():
    from deepspeed.ops.adam.multi_tensor_apply import MultiTensorApply

    assert MultiTensorApply(7)(lambda *got: got, None, [[1]], 2) == (7, None, [[1]], 2)


def _stages(rank, world):
    deepspeed.init_distributed("gloo")
    grid = PipelineParallelGrid(process_group=dist.get_world_group())
    p2p.init_process_groups(grid)
    stages, stage = grid.pipe_parallel_size, grid.get_stage_id()
    if stages > 1:
        tensor = torch.full((3,), float(rank))
        if stage == 0:
            p2p.send(tensor, 1)
            p2p.send_obj({"tensor": tensor, "n": 4}, grid.stage_to_global(1))
        if stage == 1:
            p2p.recv(tensor, 0)
            assert tensor.tolist() == [float(grid.stage_to_global(0))] * 3
            found = p2p.recv_obj(grid.stage_to_global(0))
            assert found["n"] == 4 and torch.equal(found["tensor"], tensor)
    flat = torch.full((2 * world,), -1.0)
    parts = list(flat.chunk(world))
    parts[rank].fill_(rank)
    all_gather_dp_groups([flat], [parts], [dist.get_world_group()], 1, 1000)
    assert flat.tolist() == [float(i // 2) for i in range(2 * world)]
    groups = create_mics_comm_groups(2, None)
    assert (groups.param_shard_size, groups.param_shard_rank) == (2, rank % 2)
    assert (groups.param_repli_size, groups.param_repli_rank) == (world // 2, rank // 2)
    scale_tensors([flat], 2.0)
    assert flat[-1] == 2.0 * (world - 1)
    assert groups.param_intra_node_group is groups.param_inter_node_shard_group is None
    os.environ["DS_HOST_ID"] = "aabb"[rank] if world == 4 else ""
    groups = create_mics_comm_groups(world, None, True)
    if world == 4:
        assert dist.get_all_ranks_from_group(groups.param_intra_node_group) == [[0, 1], [2, 3]][rank // 2]
        assert dist.get_all_ranks_from_group(groups.param_inter_node_shard_group) == [rank % 2, rank % 2 + 2]
    else:
        assert groups.param_intra_node_group is None  # all ranks are on one host


def _replaced(rank, world, told):
    deepspeed.init_distributed("gloo")
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
    module = deepspeed.pipe.PipelineModule
    module._count_layer_params = lambda self: [100, 1, 1]
    made = module(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    assert made.partitions() == [0, 1, 3]

    class Engine(deepspeed.DeepSpeedEngine):
        def _report_progress(self, step):
            steps.append(step)

        def _broadcast_model(self):
            broadcasts.append(self)

        def clip_fp32_gradients(self):
            raise AssertionError("nobody calls this")

    steps, broadcasts = [], []
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    model = torch.nn.Linear(4, 1)
    engine = Engine(args=None, model=model, model_parameters=model.parameters(), config=config)
    engine._support_torch_style_backward = True
    assert broadcasts == [engine]
    with logged() as lines:
        for _ in range(4):
            engine.backward(engine(torch.ones(2, 4)).mean())
            engine.step()
    assert steps == [2, 4]
    assert sum("clip_fp32_gradients was set by the script, and it has no effect" in line for line in lines) == 1
    assert sum("_support_torch_style_backward" in line for line in lines) == 1


def test_replaced_methods_are_obeyed_or_named():
    run_ranks(2, _replaced, None, fresh=True)


def test_between_ranks():
    run_ranks(4, _stages)


def _newer(rank, world):
    deepspeed.init_distributed("gloo")
    sent, got = torch.full((3,), float(rank)), torch.empty(3)
    peer = 1 - rank
    handles = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, got, peer)])
    for handle in handles:
        handle.wait()
    assert got.tolist() == [float(peer)] * 3
    refused(ValueError, "isend or deepspeed.comm.irecv", dist.P2POp, dist.broadcast, sent, peer)
    refused(ValueError, "list of deepspeed.comm.P2POp", dist.batch_isend_irecv, [])

    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4) for _ in range(4)]
    plain = torch.nn.Sequential(*layers)
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    module = deepspeed.DualPipeVModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    trained = deepspeed.initialize(model=module, config=config)[0]
    assert type(trained) is deepspeed.DualPipeVEngine and trained._plans.name == "dualpipe-v"
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    loss = trained.train_batch(iter(list(zip(x.split(2), y.split(2)))))
    plain = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
    plain.load_state_dict(start)
    assert torch.allclose(loss.cpu(), torch.nn.functional.mse_loss(plain(x), y).detach(), atol=1e-6)


def test_names_of_0_19_8_between_ranks():
    run_ranks(2, _newer)


def _settings(rank, world):
    class Gated(torch.nn.Module):
        _keep_in_fp32_modules_strict = ["gate"]

        def __init__(self):
            super().__init__()
            self.gate, self.gated = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)

        def forward(self, x):
            return self.gated(x) + self.gate(x)

    def made(**more):
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, **more}
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
        model = Gated()
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    half = {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}}
    for setting, kept in (("auto", {"gate"}), ([], set()), (["gat.*"], {"gate", "gated"}), ("gated", {"gated"})):
        module = made(keep_in_fp32_modules=setting, **half).module
        names = {name for name in ("gate", "gated") if getattr(module, name).running_mean.dtype == torch.float32}
        assert names == kept, setting
    assert gc.isenabled()
    trained = made(disable_python_gc=True, zero_optimization={"stage": 1, "compute_grad_norm": False})
    assert not gc.isenabled() and trained.collect_python_gc() >= 0
    trained.backward(trained(torch.randn(2, 4)).pow(2).sum())
    trained.step()
    assert trained.get_global_grad_norm() is None
    trained.destroy()
    assert gc.isenabled()
    refused(ValueError, "only with ZeRO Stage 1 or 2", made, zero_optimization={"stage": 3, "compute_grad_norm": False})


def test_settings_of_0_19_8():
    run_ranks(1, _settings, fresh=True)
