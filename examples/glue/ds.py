"""Fine-tunes a BERT that classifies sentences (GLUE), with DeepSpeed.

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
import glue  # noqa: E402


def main(argv=None):
    parser = glue.get_argument_parser(HERE, __doc__)
    parser = deepspeed.add_config_arguments(bert_kernel.add_arguments(parser))
    args = bert_kernel.read_configuration(glue.checked(parser.parse_args(argv)))
    samples = glue.Samples(args)
    torch.manual_seed(args.seed)
    model = bert.BertForSequenceClassification(glue.config_of(args, samples.vocabulary), bert_kernel.make_layer(args))
    if args.model_file:
        bert.load_checkpoint(model, args)
    groups = bert_kernel.with_momentum_mask(args, model, bert.groups_of(model, args.model["training"]["weight_decay"]))
    bert_kernel.drop_layers(args, model)
    model, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=groups)
    bert_kernel.agree(args, model, optimizer)
    args.max_steps = glue.steps_of(args, len(samples.train))

    state, losses = {"last_global_step": 0}, []
    if args.load_training_checkpoint:
        _, state = model.load_checkpoint(args.load_training_checkpoint, args.load_checkpoint_id)
    model.train()
    for step in range(state["last_global_step"], args.max_steps):
        glue.begin_step(args, step)
        losses.append(0.0)
        for micro_step in range(args.gradient_accumulation_steps):
            loss = model(*samples.batch(step, micro_step))
            model.backward(loss)
            model.step()
            losses[-1] += loss.item() / args.gradient_accumulation_steps
        glue.report(args, step, losses[-1], optimizer)
        if glue.is_due(args, step + 1):
            model.save_checkpoint(glue.path_of(args, "saved_models"), f"step{step + 1}", {"last_global_step": step + 1})
    glue.predict(args, model, samples, deepspeed.comm.all_reduce)
    return model, losses


if __name__ == "__main__":
    main()
