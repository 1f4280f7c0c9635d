"""``deepspeed.initialize``: from a model and a config to an engine."""

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.activation_checkpointing.checkpointing import configure_from
from deepspeed.comm.rendezvous import prepare_environment
from deepspeed.config import DeepSpeedConfig, choose_config
from deepspeed.config.world import MeshShape
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.engine.arguments import check_flags
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.pipeline_engine import DualPipeVEngine, PipelineEngine
from deepspeed.git_version_info import git_branch, git_hash
from deepspeed.log import log_dist
from deepspeed.module_inject.tp_init import merge_tp_model_init_into_config
from deepspeed.ops.muon import set_optimizer_flags
from deepspeed.pipe.module import DualPipeVModule, PipelineModule
from deepspeed.version import __version__


def initialize(
    args=None,
    model=None,
    optimizer=None,
    model_parameters=None,
    training_data=None,
    lr_scheduler=None,
    distributed_port=TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu=None,
    dist_init_required=None,
    collate_fn=None,
    config=None,
    mesh_param=None,
    config_params=None,
):
    """Wraps ``model`` in an engine.

    args: object whose ``local_rank`` and ``deepspeed_config`` are read when there.
    model: ``torch.nn.Module``.
    optimizer: a torch optimizer, or a callable that makes one from parameters; goes before the config's.
    model_parameters: parameters or parameter groups to optimise; all trainable ones by default.
    training_data: a torch dataset; the third result is then a loader that gives each rank its part.
    lr_scheduler: a scheduler, or a callable that makes one from the optimizer; goes before the config's.
    distributed_port: port of rank 0 where the environment names none.
    mpu: object with Megatron's ``get_{data,model}_parallel_{rank,world_size,group}`` methods.
    dist_init_required: whether to set up ``torch.distributed``; None: when nobody has.
    collate_fn: makes a batch of samples for the loader.
    config: dict, path to a JSON file, or base64 of JSON; ``config_params`` is its older name.
    mesh_param: ``(data, sequence)`` sizes of a mesh of all ranks: neighbours share a sequence. The engine's
        ``mesh_device`` is then torch's ``DeviceMesh``, where torch has them (2.2 and later).

    Returns ``(engine, optimizer, training_dataloader, lr_scheduler)``; what there is no such thing of is None.
    """
    assert model is not None, "deepspeed.initialize needs a model: pass model="
    check_flags(args)
    pipeline = isinstance(model, PipelineModule)
    if pipeline:
        assert mpu is None, "the ranks of a PipelineModule are those of its topology: leave mpu= out"
        mpu = model.mpu()
    log_dist(f"DeepSpeed info: version={__version__}, git-hash={git_hash}, git-branch={git_branch}", ranks=[0])
    found = merge_tp_model_init_into_config(choose_config(args, config, config_params), mpu, mesh_param, dist)
    if mesh_param is not None and mpu is not None:
        raise ValueError("mesh_param and mpu both say which ranks share what: pass one of them")
    mesh = MeshShape(mesh_param) if mesh_param is not None else None
    # The config is judged before any process group is made: a wrong one must not leave other ranks waiting. How many
    # ranks there are comes from the environment, which mpirun fills in its own way.
    if not dist.is_initialized() and dist_init_required is not False:
        prepare_environment(auto_mpi_discovery=True, distributed_port=distributed_port, verbose=False)
    parsed = DeepSpeedConfig(found, mpu, mesh_device=mesh)
    if dist_init_required is not False or not dist.is_initialized():
        dist.init_distributed(
            dist_backend=get_accelerator().communication_backend_name(),
            distributed_port=distributed_port,
            dist_init_required=dist_init_required,
            config=parsed,
        )
    dist.configure(deepspeed_config=parsed)
    configure_from(parsed, mpu)
    set_optimizer_flags(parsed, model)
    pipelines = DualPipeVEngine if isinstance(model, DualPipeVModule) else PipelineEngine
    engine = (pipelines if pipeline else DeepSpeedEngine)(
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=mpu,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=found,
        config_class=parsed,
        mesh_device=mesh,
    )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler
