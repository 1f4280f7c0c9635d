"""Trains a GPT-2 on text, with PyTorch and layers that are split over ranks."""

import torch

import gpt2_fp16
import gpt2_model
import gpt2_mpu as mpu
import gpt2_parts


def get_args(argv):
    parser = gpt2_parts.get_argument_parser(__doc__)
    return gpt2_parts.with_defaults(gpt2_parts.checked(parser.parse_args(argv)))


def initialize_distributed(args):
    mpu.init_process_group(args.local_rank)
    mpu.initialize_model_parallel(args.model_parallel_size)
    mpu.model_parallel_cuda_manual_seed(args.seed)


def setup_model_and_optimizer(args):
    torch.manual_seed(args.seed)
    model = gpt2_model.GPT2(args)
    args.device = mpu.device_of(args.local_rank)
    model.to(args.device)
    optimizer = torch.optim.AdamW(gpt2_model.groups_of(model), lr=args.lr)
    lr_scheduler = gpt2_parts.get_learning_rate_scheduler(args, optimizer)
    optimizer = gpt2_fp16.FP16_Optimizer(optimizer, model.half()) if args.fp16 else optimizer
    return model, optimizer, lr_scheduler


def train_step(args, batch, model, optimizer, lr_scheduler):
    loss = model(*batch)
    optimizer.zero_grad()
    gpt2_fp16.backward(optimizer, loss)
    mpu.all_reduce_gradients(model)
    gpt2_fp16.update_master_grads(optimizer)
    mpu.clip_grad_norm(optimizer, args.clip_grad)
    optimizer.step()
    lr_scheduler.step()
    return mpu.average(loss)


def save_checkpoint(args, iteration, model, optimizer, lr_scheduler):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": lr_scheduler.state_dict()}
    gpt2_parts.save(args.save, {"iteration": iteration, **state})


def load_checkpoint(args, model, optimizer, lr_scheduler):
    state = gpt2_parts.load(args.load, args.device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    lr_scheduler.load_state_dict(state["scheduler"])
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
        scale = getattr(optimizer, "loss_scale", 1.0)
        gpt2_parts.report(args, iteration + 1, losses[-1], rate, scale)
        if gpt2_parts.is_due(args, iteration + 1):
            save_checkpoint(args, iteration + 1, model, optimizer, lr_scheduler)
    return model, losses


if __name__ == "__main__":
    main()
