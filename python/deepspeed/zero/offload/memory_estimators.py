"""Estimates of the memory that the states of a model will need: the published rules of thumb as tables.

For mixed precision with Adam; activations come on top. "All live" takes a model, "all cold" only its sizes. The
arithmetic is csrc/plan/memory_plan.h. Bytes unless a name says otherwise.
"""

from deepspeed._native import _C
from deepspeed.zero.parameters.param_ranks import numel_of

GIB = 2**30


def _largest_layer(model):
    return max((sum(map(numel_of, module.parameters(recurse=False))) for module in model.modules()), default=0)


def _total(model):
    return sum(map(numel_of, model.parameters()))


# ---- stage 2 ------------------------------------------------------------------------------------------------------
def estimate_zero2_model_states_mem_needs(
    total_params, num_gpus_per_node=1, num_nodes=1, cpu_offload=True, additional_buffer_factor=1.5
):
    """``(host bytes per node, device bytes per GPU)`` of stages 1 and 2. ``additional_buffer_factor``: how much more
    than the states themselves the host needs."""
    host, device = _C.memory.zero2_need(total_params, num_gpus_per_node, num_nodes, cpu_offload)
    return int(host * additional_buffer_factor), device


def estimate_zero2_model_states_mem_needs_all_live(
    model, num_gpus_per_node=1, num_nodes=1, additional_buffer_factor=1.5
):
    """Prints what ``model`` needs at stage 2, with and without offload."""
    estimate_zero2_model_states_mem_needs_all_cold(
        _total(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params, num_gpus_per_node=1, num_nodes=1, additional_buffer_factor=1.5
):
    """Prints what a model of ``total_params`` parameters needs at stage 2, with and without offload."""
    sizes = (total_params, num_gpus_per_node, num_nodes)
    rows = [
        (
            *estimate_zero2_model_states_mem_needs(*sizes, offload, additional_buffer_factor),
            f"offload_optimizer={_device(offload)}",
        )
        for offload in (True, False)
    ]
    _print_table(f"{int(total_params / 1e6)}M total params", num_gpus_per_node, num_nodes, rows)


# ---- stage 3 ------------------------------------------------------------------------------------------------------
def estimate_zero3_model_states_mem_needs(
    total_params,
    largest_layer_params,
    num_gpus_per_node=1,
    num_nodes=1,
    cpu_offload=True,
    cpu_offload_params=True,
    zero_init=True,
    additional_buffer_factor=1.5,
):
    """``(host bytes per node, device bytes per GPU, bytes of the gathered largest layer)`` of stage 3.

    zero_init: the model is built inside ``deepspeed.zero.Init``.
    """
    # Parameters follow the optimizer to the host, never alone.
    host, device = _C.memory.zero3_need(
        total_params,
        largest_layer_params,
        num_gpus_per_node,
        num_nodes,
        cpu_offload,
        cpu_offload and cpu_offload_params,
        zero_init,
    )
    return int(host * additional_buffer_factor), device, 4 * largest_layer_params


def estimate_zero3_model_states_mem_needs_all_live(
    model, num_gpus_per_node=1, num_nodes=1, additional_buffer_factor=1.5
):
    """Prints what ``model`` needs at stage 3, for all ways to offload and to build it."""
    estimate_zero3_model_states_mem_needs_all_cold(
        _total(model), _largest_layer(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params, largest_layer_params, num_gpus_per_node=1, num_nodes=1, additional_buffer_factor=1.5
):
    """Prints what a model needs at stage 3 whose largest layer has ``largest_layer_params`` parameters."""
    known = (total_params, largest_layer_params, num_gpus_per_node, num_nodes)
    rows = [
        (
            *estimate_zero3_model_states_mem_needs(*known, offload, params, zero_init, additional_buffer_factor)[:2],
            f"offload_param={_device(params)}, offload_optimizer={_device(offload)}, zero_init={int(zero_init)}",
        )
        for offload, params in ((True, True), (True, False), (False, False))
        for zero_init in (True, False)
    ]
    sizes = f"{int(total_params / 1e6)}M total params, {int(largest_layer_params / 1e6)}M largest layer params"
    _print_table(sizes, num_gpus_per_node, num_nodes, rows)


def _device(offload):
    return f"{'cpu' if offload else 'none':4}"


def _print_table(sizes, num_gpus_per_node, num_nodes, rows):
    nodes = f"{num_nodes} node{'' if num_nodes == 1 else 's'}"
    gpus = f"{num_gpus_per_node} GPU{'' if num_gpus_per_node == 1 else 's'}"
    print(
        f"Estimated memory needed for params, optim states and gradients for a:\n"
        f"HW: Setup with {nodes}, {gpus} per node.\n"
        f"SW: Model with {sizes}.\n"
        f"  per CPU  |  per GPU |   Options"
    )
    for host, device, options in rows:
        print(f"{host / GIB:8.2f}GB |{device / GIB:7.2f}GB | {options}")
