"""The tuner against an exhaustive search: a tiny GPT, 60 configurations (6 micro-batches, stage 0,
and stages 1 to 3 with 3 sizes of buckets).

    python benchmarks/python/tuner.py [--ranks 2] [--trials 20] [--json FILE]

Both searches run the same script through ``deepspeed --autotuning tune``. What the tuner with ``model_based`` has
chosen in ``--trials`` runs is compared by the speed that the exhaustive search has measured for it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

from common import machine

HERE = os.path.dirname(os.path.abspath(__file__))
GRID = {
    "train_micro_batch_size_per_gpu": [1, 2, 4, 8, 16, 32],
    "zero_optimization": {"stage": [0, 1, 2, 3], "reduce_bucket_size": [20_000, 100_000, 500_000_000]},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
CONTEXT, VOCABULARY, WIDTH, LAYERS = 64, 1024, 128, 2


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--deepspeed_config", help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    return parser.parse_args()


def train(args):
    """The script that is tuned; an experiment ends it."""
    import torch

    import deepspeed

    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(VOCABULARY, WIDTH)
            layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            self.layers = torch.nn.TransformerEncoder(layer, LAYERS)
            self.out = torch.nn.Linear(WIDTH, VOCABULARY)

        def forward(self, tokens):
            later = torch.full((CONTEXT, CONTEXT), float("-inf")).triu(1)
            logits = self.out(self.layers(self.words(tokens), mask=later))
            return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    torch.manual_seed(0)
    engine = deepspeed.initialize(model=Tiny(), config=args.deepspeed_config)[0]
    for _ in range(1000):
        engine.backward(engine(torch.randint(VOCABULARY, (engine.train_micro_batch_size_per_gpu(), CONTEXT))))
        engine.step()


def search(args, folder, **section):
    """``{experiment: samples per second}`` of a search."""
    own = {"enabled": True, "results_dir": f"{folder}/results", "exps_dir": f"{folder}/exps", "tuner_early_stopping": 0}
    own |= {"start_profile_step": 3, "end_profile_step": 11}
    os.makedirs(folder)
    with open(f"{folder}/ds.json", "w", encoding="utf-8") as file:
        json.dump({**GRID, "autotuning": {**own, **section}}, file)
    command = [sys.executable, "-m", "deepspeed.launcher", "--autotuning", "tune", f"--num_gpus={args.ranks}"]
    done = subprocess.run([*command, os.path.abspath(__file__), "--deepspeed_config", f"{folder}/ds.json"])
    if done.returncode:
        sys.exit("a search failed; its message is above")
    found = {}
    for name in os.listdir(f"{folder}/results"):
        path = f"{folder}/results/{name}/metrics.json"
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                found[name] = json.load(file)["throughput"]
    return found


def main():
    args = parse_arguments()
    if args.deepspeed_config:
        train(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        every = search(args, f"{folder}/every", tuner_type="gridsearch", tuner_num_trials=60)
        some = search(args, f"{folder}/some", tuner_type="model_based", tuner_num_trials=args.trials)
    chosen, best = max(some, key=some.get), max(every, key=every.get)
    figures = {
        "experiments of the exhaustive search": len(every),
        "its best": best,
        "samples per second": every[best],
        "experiments of the tuner": len(some),
        "its choice": chosen,
        "samples per second of the choice, in the exhaustive search": every[chosen],
        "share of the best": every[chosen] / every[best],
        "all": every,
    }
    print(json.dumps(figures, indent=1))
    machine.write_json(args.json, "tuner", figures)


if __name__ == "__main__":
    main()
