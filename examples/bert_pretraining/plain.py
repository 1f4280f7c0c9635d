"""Pre-trains a BERT on text, in PyTorch alone.

    python plain.py --cf bert_tiny.json --max_steps 20
"""

import os
import sys

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "common"))

import bert  # noqa: E402
import pretraining  # noqa: E402


class BertMultiTask:
    """A model whose torch module is ``network``."""

    def __init__(self, args, vocabulary):
        self.network = bert.BertForPreTraining(bert.config_of(args.model, vocabulary)).to(args.device)


def get_arguments(argv):
    parser = pretraining.get_argument_parser(HERE, __doc__)
    return pretraining.for_one_process(pretraining.checked(parser.parse_args(argv)))


def prepare_model_optimizer(args, vocabulary):
    torch.manual_seed(args.seed)
    model = BertMultiTask(args, vocabulary)
    groups = bert.groups_of(model.network, args.model["training"]["weight_decay"])
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, eps=1e-6)
    return model, optimizer


def checkpoint_model(args, model, optimizer, state):
    path, tag = pretraining.path_of(args, "saved_models"), f"step{state['last_global_step']}"
    os.makedirs(os.path.join(path, tag), exist_ok=True)
    states = {"module": model.network.state_dict(), "optimizer": optimizer.state_dict(), **state}
    torch.save(states, os.path.join(path, tag, "states.pt"))


def load_training_checkpoint(args, model, optimizer):
    path, tag = args.load_training_checkpoint, args.load_checkpoint_id
    state = torch.load(os.path.join(path, tag, "states.pt"))
    model.network.load_state_dict(state.pop("module"))
    optimizer.load_state_dict(state.pop("optimizer"))
    return state


def main(argv=None):
    args = get_arguments(argv)
    samples = pretraining.Samples(args)
    samples.save_vocabulary()
    model, optimizer = prepare_model_optimizer(args, samples.vocabulary)
    state = pretraining.new_state()
    if args.load_training_checkpoint:
        state = load_training_checkpoint(args, model, optimizer)
    args.first_step = state["last_global_step"]
    model.network.train()
    losses = []
    for step in range(args.first_step, args.max_steps):
        pretraining.begin_step(args, step)
        pretraining.schedule_learning_rate(args, optimizer, step)
        total = 0.0
        for micro_step in range(args.gradient_accumulation_steps):
            batch = samples.batch(state["last_global_data_samples"], micro_step)
            loss = model.network(*batch)
            (loss / args.gradient_accumulation_steps).backward()
            total += loss.item() / args.gradient_accumulation_steps
        torch.nn.utils.clip_grad_norm_(model.network.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        pretraining.report(args, step, total, optimizer)
        state["last_global_step"] += 1
        state["last_global_data_samples"] += args.train_batch_size
        if pretraining.is_due(args, step + 1):
            checkpoint_model(args, model, optimizer, state)
    return model.network, losses


if __name__ == "__main__":
    main()
