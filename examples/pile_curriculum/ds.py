"""Trains a BERT or a GPT on text in the format of the Pile, for a number of tokens, with DeepSpeed.

    deepspeed --num_accelerators 2 ds.py --model bert --deepspeed --deepspeed_config ds_config.json
"""

import sys

import torch

import deepspeed
import pile_parts


def main(argv=None):
    """Returns the trained model and the loss of each step."""
    parser = pile_parts.get_argument_parser(__doc__, pile_parts.TRAINING)
    deepspeed.add_config_arguments(parser)
    args = pile_parts.checked(parser.parse_args(argv))
    words, _, samples = pile_parts.read_data(args)
    torch.manual_seed(args.seed)
    model = pile_parts.model_of(args, words)
    optimizer = torch.optim.AdamW(pile_parts.groups_of(model, 0.01), lr=args.lr)
    try:
        model, optimizer, loader, _ = deepspeed.initialize(args, model, optimizer, training_data=samples)
    except FileNotFoundError as error:
        sys.exit(f"{error}. This command runs it: python analyse.py --model {args.model}")
    model.set_data_post_process_func(pile_parts.cut)
    args.rank, args.device = model.global_rank, model.device
    args.gradient_accumulation_steps = model.gradient_accumulation_steps()
    state = {"steps": 0, "consumed_tokens": 0}
    if args.load:
        path, state = model.load_checkpoint(args.load)
        if path is None:
            sys.exit(f"--load {args.load}: this folder has no checkpoint")
    batches = deepspeed.utils.RepeatingLoader(loader)

    losses = []
    while state["consumed_tokens"] < args.train_tokens:
        pile_parts.set_learning_rate(args, optimizer, state["consumed_tokens"])
        losses.append(0.0)
        for part in range(args.gradient_accumulation_steps):
            batch = [one.to(args.device) for one in next(batches)]
            pile_parts.begin_step(args, f"{state['steps']} {part}")
            loss = model(*batch)
            model.backward(loss)
            model.count_tokens(pile_parts.count_tokens(batch))
            model.step()
            losses[-1] += loss.item() / args.gradient_accumulation_steps
        state["consumed_tokens"] = model.consumed_tokens
        state["steps"] += 1
        if pile_parts.report(args, state, losses[-1], optimizer, batch):
            model.save_checkpoint(args.save, client_state=state)
    return model, losses


if __name__ == "__main__":
    main()
