"""Trains a classifier of CIFAR-10's images with PyTorch alone."""

import torch
import torch.nn as nn

import cifar10


def main(argv=None):
    """Returns the trained network and the loss of each step."""
    parser = cifar10.parser()
    args = parser.parse_args(argv)
    trainset, testset = cifar10.data_sets(args)
    torch.manual_seed(args.seed)
    net = cifar10.Net()
    average = cifar10.averaged(net) if args.use_ema else None
    device = torch.device("cuda:0" if args.with_cuda and torch.cuda.is_available() else "cpu")
    net.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.001, betas=(0.8, 0.999), eps=1e-8, weight_decay=3e-7)
    sampler = torch.utils.data.DistributedSampler(trainset, num_replicas=1, rank=0)
    trainloader = torch.utils.data.DataLoader(trainset, args.batch_size, sampler=sampler)
    criterion = nn.CrossEntropyLoss()
    show = args.local_rank <= 0
    if show:
        print(device)

    first, losses = 0, []
    if args.resume:
        state = torch.load(args.resume)
        first = state["epoch"]
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
    for epoch in range(first, args.epochs):
        running_loss = 0.0
        sampler.set_epoch(epoch)
        for i, (images, labels) in enumerate(trainloader):
            optimizer.zero_grad()
            outputs = net(images.to(device, net.conv1.weight.dtype))
            loss = criterion(outputs.float(), labels.to(device))
            loss.backward()
            optimizer.step()
            if average:
                average.update_parameters(net)
            losses.append(loss.item())
            running_loss += losses[-1]
            if show and i % args.log_interval == args.log_interval - 1:
                print(f"[{epoch + 1}, {i + 1:5d}] loss: {running_loss / args.log_interval:.3f}")
                running_loss = 0.0
        if args.save:
            state = {"epoch": epoch + 1, "net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, args.save)
    if show:
        print("Finished Training")
    cifar10.test(average.to(device) if average else net, testset, device, show)
    return net, losses


if __name__ == "__main__":
    main()
