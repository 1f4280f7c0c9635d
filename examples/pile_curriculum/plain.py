"""Trains a BERT or a GPT on text in the format of the Pile, for a number of tokens, in PyTorch alone.

    python plain.py --model bert
"""

import torch

import pile_parts


def main(argv=None):
    """Returns the trained model and the loss of each step."""
    parser = pile_parts.get_argument_parser(__doc__, {**pile_parts.TRAINING, **pile_parts.PLAIN})
    parser.set_defaults(rank=0, device="cuda" if torch.cuda.is_available() else "cpu")
    args = pile_parts.checked(parser.parse_args(argv))
    words, _, samples = pile_parts.read_data(args)
    torch.manual_seed(args.seed)
    model = pile_parts.model_of(args, words).to(args.device)
    optimizer = torch.optim.AdamW(pile_parts.groups_of(model, 0.01), lr=args.lr)
    state = {"steps": 0, "consumed_tokens": 0}
    if args.load:
        state = torch.load(args.load)
        model.load_state_dict(state.pop("model"))
        optimizer.load_state_dict(state.pop("optimizer"))
    numbers = pile_parts.order(args, len(samples), state["steps"])
    batches = iter(torch.utils.data.DataLoader(samples, batch_sampler=numbers))

    losses = []
    while state["consumed_tokens"] < args.train_tokens:
        pile_parts.set_learning_rate(args, optimizer, state["consumed_tokens"])
        losses.append(0.0)
        for part in range(args.gradient_accumulation_steps):
            batch = [one.to(args.device) for one in next(batches)]
            pile_parts.begin_step(args, f"{state['steps']} {part}")
            loss = model(*batch)
            (loss / args.gradient_accumulation_steps).backward()
            state["consumed_tokens"] += pile_parts.count_tokens(batch)
            losses[-1] += loss.item() / args.gradient_accumulation_steps
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        state["steps"] += 1
        if pile_parts.report(args, state, losses[-1], optimizer, batch):
            torch.save({**state, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.save)
    return model, losses


if __name__ == "__main__":
    main()
