"""Trains a classifier of CIFAR-10's images with DeepSpeed."""

import torch
import torch.nn as nn

import cifar10
import cifar_experts
import deepspeed


def main(argv=None):
    """Returns the trained network and the loss of each step."""
    parser = cifar10.parser()
    deepspeed.add_config_arguments(cifar_experts.add_arguments(parser))
    args = parser.parse_args(argv)
    trainset, testset = cifar10.data_sets(args)
    torch.manual_seed(args.seed)
    net = cifar10.Net()
    average = cifar10.averaged(net) if args.use_ema else None
    parameters = cifar_experts.add_experts(net, args)
    model_engine, optimizer, trainloader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=trainset
    )
    device = deepspeed.get_accelerator().device_name(model_engine.local_rank)
    criterion = nn.CrossEntropyLoss()
    show = args.local_rank <= 0
    if show:
        print(device)

    first, losses = 0, []
    if args.resume:
        path, state = model_engine.load_checkpoint(args.resume)
        if path is None:
            raise SystemExit(f"--resume {args.resume}: this folder has no checkpoint")
        first = state["epoch"]
    for epoch in range(first, args.epochs):
        running_loss = 0.0
        for i, (images, labels) in enumerate(trainloader):
            outputs = model_engine(images.to(device, net.conv1.weight.dtype))
            loss = criterion(outputs.float(), labels.to(device))
            model_engine.backward(loss + cifar_experts.balance(net))
            model_engine.step()
            if average:
                with deepspeed.zero.GatheredParameters(list(net.parameters())):
                    average.update_parameters(net)
            losses.append(loss.item())
            running_loss += losses[-1]
            if show and i % args.log_interval == args.log_interval - 1:
                print(f"[{epoch + 1}, {i + 1:5d}] loss: {running_loss / args.log_interval:.3f}")
                running_loss = 0.0
        if args.save:
            model_engine.save_checkpoint(args.save, client_state={"epoch": epoch + 1})
    if show:
        print("Finished Training")
    cifar10.test(average.to(device) if average else model_engine, testset, device, show)
    return net, losses


if __name__ == "__main__":
    main()
