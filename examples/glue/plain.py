"""Fine-tunes a BERT that classifies sentences (GLUE), in PyTorch alone.

    python plain.py
"""

import os
import sys

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "common"))

import bert  # noqa: E402
import glue  # noqa: E402


def main(argv=None):
    parser = glue.get_argument_parser(HERE, __doc__)
    args = glue.for_one_process(glue.checked(parser.parse_args(argv)))
    samples = glue.Samples(args)
    args.max_steps = glue.steps_of(args, len(samples.train))
    torch.manual_seed(args.seed)
    model = bert.BertForSequenceClassification(glue.config_of(args, samples.vocabulary)).to(args.device)
    if args.model_file:
        bert.load_checkpoint(model, args)
    groups = bert.groups_of(model, args.model["training"]["weight_decay"])
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, eps=1e-6)

    state, losses = {"last_global_step": 0}, []
    if args.load_training_checkpoint:
        state = torch.load(os.path.join(args.load_training_checkpoint, args.load_checkpoint_id, "states.pt"))
        model.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
    model.train()
    for step in range(state["last_global_step"], args.max_steps):
        glue.begin_step(args, step)
        losses.append(0.0)
        for micro_step in range(args.gradient_accumulation_steps):
            loss = model(*samples.batch(step, micro_step))
            (loss / args.gradient_accumulation_steps).backward()
            losses[-1] += loss.item() / args.gradient_accumulation_steps
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        glue.report(args, step, losses[-1], optimizer)
        if glue.is_due(args, step + 1):
            states = {"module": model.state_dict(), "optimizer": optimizer.state_dict(), "last_global_step": step + 1}
            torch.save(states, glue.path_of(args, os.path.join("saved_models", f"step{step + 1}", "states.pt")))
    glue.predict(args, model, samples)
    return model, losses


if __name__ == "__main__":
    main()
