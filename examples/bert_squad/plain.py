"""Fine-tunes a BERT that answers questions about a text (SQuAD 1.1), in PyTorch alone.

    python plain.py
"""

import os
import sys

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "common"))

import bert  # noqa: E402
import squad  # noqa: E402


def get_arguments(argv):
    parser = squad.get_argument_parser(HERE, __doc__)
    return squad.for_one_process(squad.checked(parser.parse_args(argv)))


def prepare_model_optimizer(args, vocabulary):
    torch.manual_seed(args.seed)
    model = bert.BertForQuestionAnswering(squad.config_of(args, vocabulary)).to(args.device)
    if args.model_file:
        bert.load_checkpoint(model, args)
    groups = bert.groups_of(model, args.model["training"]["weight_decay"])
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, eps=1e-6)
    return model, optimizer


def checkpoint_model(args, model, optimizer, state):
    path, tag = squad.path_of(args, "saved_models"), f"step{state['last_global_step']}"
    os.makedirs(os.path.join(path, tag), exist_ok=True)
    states = {"module": model.state_dict(), "optimizer": optimizer.state_dict(), **state}
    torch.save(states, os.path.join(path, tag, "states.pt"))


def load_training_checkpoint(args, model, optimizer):
    path, tag = args.load_training_checkpoint, args.load_checkpoint_id
    state = torch.load(os.path.join(path, tag, "states.pt"))
    model.load_state_dict(state.pop("module"))
    optimizer.load_state_dict(state.pop("optimizer"))
    return state


def main(argv=None):
    args = get_arguments(argv)
    questions = squad.Questions(args)
    model, optimizer = prepare_model_optimizer(args, questions.vocabulary)
    args.max_steps = questions.steps()
    state = squad.new_state()
    if args.load_training_checkpoint:
        state = load_training_checkpoint(args, model, optimizer)
    model.train()
    losses = []
    for step in range(state["last_global_step"], args.max_steps):
        squad.begin_step(args, step)
        total = 0.0
        for micro_step in range(args.gradient_accumulation_steps):
            input_ids, segment_ids, input_mask, start_positions, end_positions = questions.batch(
                state["last_global_data_samples"], micro_step
            )
            loss = model(input_ids, segment_ids, input_mask, start_positions, end_positions)
            (loss / args.gradient_accumulation_steps).backward()
            total += loss.item() / args.gradient_accumulation_steps
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        squad.report(args, step, total, optimizer)
        state["last_global_step"] += 1
        state["last_global_data_samples"] += args.train_batch_size
        if squad.is_due(args, step + 1):
            checkpoint_model(args, model, optimizer, state)
    squad.predict(args, model, questions)
    return model, losses


if __name__ == "__main__":
    main()
