"""Pre-trains a BERT on text, with DeepSpeed.

    deepspeed --num_accelerators 2 ds.py --deepspeed --deepspeed_config ds_config.json
"""

import os
import sys

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "common"))

import bert  # noqa: E402
import bert_kernel  # noqa: E402
import deepspeed  # noqa: E402
import pretraining  # noqa: E402


class BertMultiTask:
    """A model whose torch module is ``network``."""

    def __init__(self, args, vocabulary):
        self.network = bert.BertForPreTraining(bert.config_of(args.model, vocabulary), bert_kernel.make_layer(args))


def get_arguments(argv):
    parser = pretraining.get_argument_parser(HERE, __doc__)
    parser = deepspeed.add_config_arguments(bert_kernel.add_arguments(parser))
    return bert_kernel.read_configuration(pretraining.checked(parser.parse_args(argv)))


def prepare_model_optimizer(args, vocabulary):
    torch.manual_seed(args.seed)
    model = BertMultiTask(args, vocabulary)
    groups = bert.groups_of(model.network, args.model["training"]["weight_decay"])
    groups = bert_kernel.with_momentum_mask(args, model.network, groups)
    bert_kernel.drop_layers(args, model.network)
    model.network, optimizer, _, _ = deepspeed.initialize(
        args=args, model=model.network, model_parameters=groups, dist_init_required=False
    )
    bert_kernel.agree(args, model.network, optimizer)
    return model, optimizer


def checkpoint_model(args, model, optimizer, state):
    path, tag = pretraining.path_of(args, "saved_models"), f"step{state['last_global_step']}"
    model.network.save_checkpoint(path, tag, state)


def load_training_checkpoint(args, model, optimizer):
    path, tag = args.load_training_checkpoint, args.load_checkpoint_id
    _, state = model.network.load_checkpoint(path, tag)
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
            model.network.backward(loss)
            model.network.step()
            total += loss.item() / args.gradient_accumulation_steps
        losses.append(total)
        pretraining.report(args, step, total, optimizer)
        state["last_global_step"] += 1
        state["last_global_data_samples"] += args.train_batch_size
        if pretraining.is_due(args, step + 1):
            checkpoint_model(args, model, optimizer, state)
    return model.network, losses


if __name__ == "__main__":
    main()
