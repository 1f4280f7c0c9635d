"""Trains a GPT-2 on text, with DeepSpeed and layers that are split over ranks."""

import torch

import deepspeed
import gpt2_model
import gpt2_mpu as mpu
import gpt2_parts


def get_args(argv):
    parser = gpt2_parts.get_argument_parser(__doc__)
    deepspeed.add_config_arguments(parser)
    return gpt2_parts.checked(parser.parse_args(argv))


def initialize_distributed(args):
    deepspeed.init_distributed()
    mpu.initialize_model_parallel(args.model_parallel_size)
    deepspeed.checkpointing.configure(mpu, deepspeed_config=args.deepspeed_config)
    for name in ("checkpoint", "get_cuda_rng_tracker", "model_parallel_cuda_manual_seed"):
        setattr(mpu, name, getattr(deepspeed.checkpointing, name))
    mpu.model_parallel_cuda_manual_seed(args.seed)


def setup_model_and_optimizer(args):
    torch.manual_seed(args.seed)
    model = gpt2_model.GPT2(args)
    optimizer = torch.optim.AdamW(gpt2_model.groups_of(model), lr=args.lr)
    lr_scheduler = gpt2_parts.get_learning_rate_scheduler(args, optimizer)
    model, optimizer, _, lr_scheduler = deepspeed.initialize(
        args=args, model=model, optimizer=optimizer, lr_scheduler=lr_scheduler, mpu=mpu, dist_init_required=False
    )
    args.device = model.device
    gpt2_parts.agree(args, model.train_micro_batch_size_per_gpu(), model.gradient_clipping(), model.fp16_enabled())
    return model, optimizer, lr_scheduler


def train_step(args, batch, model, optimizer, lr_scheduler):
    loss = model(*batch)
    model.backward(loss)
    model.step()
    return mpu.average(loss)


def save_checkpoint(args, iteration, model, optimizer, lr_scheduler):
    model.save_checkpoint(args.save, client_state={"iteration": iteration})


def load_checkpoint(args, model, optimizer, lr_scheduler):
    path, state = model.load_checkpoint(args.load)
    gpt2_parts.check_load(args.load, path)
    return state["iteration"]


def main(argv=None):
    """Returns the trained model and the loss of each step."""
    args = get_args(argv)
    initialize_distributed(args)
    samples = gpt2_parts.Samples(args)
    model, optimizer, lr_scheduler = setup_model_and_optimizer(args)
    first = load_checkpoint(args, model, optimizer, lr_scheduler) if args.load else 0
    model.train()
    losses = []
    for iteration in range(first, args.train_iters):
        gpt2_parts.begin_step(args, iteration)
        rate = optimizer.param_groups[0]["lr"]
        losses.append(train_step(args, samples.batch(iteration), model, optimizer, lr_scheduler))
        scale = getattr(optimizer, "cur_scale", 1.0)
        gpt2_parts.report(args, iteration + 1, losses[-1], rate, scale)
        if gpt2_parts.is_due(args, iteration + 1):
            save_checkpoint(args, iteration + 1, model, optimizer, lr_scheduler)
    return model, losses


if __name__ == "__main__":
    main()
