"""Fine-tunes a BERT that answers questions about a text (SQuAD 1.1), with DeepSpeed.

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
import squad  # noqa: E402


def get_arguments(argv):
    parser = squad.get_argument_parser(HERE, __doc__)
    parser = deepspeed.add_config_arguments(bert_kernel.add_arguments(parser))
    return bert_kernel.read_configuration(squad.checked(parser.parse_args(argv)))


def prepare_model_optimizer(args, vocabulary):
    torch.manual_seed(args.seed)
    model = bert.BertForQuestionAnswering(squad.config_of(args, vocabulary), bert_kernel.make_layer(args))
    if args.model_file:
        bert.load_checkpoint(model, args)
    groups = bert.groups_of(model, args.model["training"]["weight_decay"])
    groups = bert_kernel.with_momentum_mask(args, model, groups)
    bert_kernel.drop_layers(args, model)
    model, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=groups)
    bert_kernel.agree(args, model, optimizer)
    return model, optimizer


def checkpoint_model(args, model, optimizer, state):
    path, tag = squad.path_of(args, "saved_models"), f"step{state['last_global_step']}"
    model.save_checkpoint(path, tag, state)


def load_training_checkpoint(args, model, optimizer):
    path, tag = args.load_training_checkpoint, args.load_checkpoint_id
    _, state = model.load_checkpoint(path, tag)
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
            model.backward(loss)
            model.step()
            total += loss.item() / args.gradient_accumulation_steps
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
