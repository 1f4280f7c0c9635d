"""Experts in the CIFAR-10 network of ds.py: its last hidden layer becomes a mixture of experts."""

import torch.nn as nn

from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer


def add_arguments(parser):
    """Adds the flags of experts to the parser and returns it."""
    group = parser.add_argument_group("experts")
    group.add_argument("--moe", action="store_true", help="use mixture of experts")
    group.add_argument("--ep-world-size", type=int, default=1, help="ranks that share the experts of a layer")
    group.add_argument("--num-experts", type=int, nargs="+", default=[1], help="experts of each layer")
    group.add_argument("--mlp-type", choices=["standard", "residual"], default="standard")
    group.add_argument("--top-k", type=int, default=1, help="experts of each image, 1 or 2")
    group.add_argument("--min-capacity", type=int, default=0, help="images that each expert can take in any case")
    group.add_argument("--noisy-gate-policy", choices=["RSample", "Jitter"], help="noise in the choice; default: none")
    group.add_argument("--moe-param-group", action="store_true", help="give experts parameter groups of their own")
    return parser


class Experts(nn.Module):
    """Layers of experts of 84 to 84, because an expert returns as many numbers as it gets, and a layer of 84 to 10."""

    def __init__(self, args):
        super().__init__()
        options = {"ep_size": args.ep_world_size, "k": args.top_k, "min_capacity": args.min_capacity}
        options.update(use_residual=args.mlp_type == "residual", noisy_gate_policy=args.noisy_gate_policy)
        layers = [MoE(84, nn.Linear(84, 84), count, eval_capacity_factor=2.0, **options) for count in args.num_experts]
        self.layers, self.fc4 = nn.ModuleList(layers), nn.Linear(84, 10)

    def forward(self, x):
        self.imbalance = 0.0
        for layer in self.layers:
            x, imbalance, _ = layer(x)
            self.imbalance = self.imbalance + imbalance
        return self.fc4(x)


def add_experts(net, args):
    """Gives the network experts if ``--moe`` asks for them. Returns the parameters for ``deepspeed.initialize``."""
    if args.moe and args.use_ema:
        raise SystemExit("--use_ema copies the network, and each rank has other experts: leave out --use_ema or --moe")
    if args.moe:
        net.fc3 = Experts(args)
    if args.moe and args.moe_param_group:
        return split_params_into_different_moe_groups_for_optimizer({"params": list(net.parameters()), "name": "net"})
    return net.parameters()


def balance(net):
    """The part of the loss that lets experts get equally many images."""
    return 0.01 * getattr(net.fc3, "imbalance", 0.0)
