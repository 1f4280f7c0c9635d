"""Time and memory of generated text, of a model as it is or through ``deepspeed.init_inference``.

    deepspeed --num_gpus 2 benchmarks/python/inference_test.py --name tiny --test_performance --ds_inference

``--name``: "tiny" or "100m", models with random weights and the shape of Llama, which need no other library; else a
name or a folder that transformers loads. With ``--ds_inference`` the ranks share the model (``tp_size`` is their
number), else each of them has the whole. Rank 0 prints the latency of a token, the bandwidth at which its weights were
read, the throughput of all samples and its peak memory: means over ``--rounds`` texts behind one that is not counted.
"""

import argparse
import os
import resource
import time

import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

try:
    import transformers
except ImportError:
    transformers = None

BUILT_IN = {
    "tiny": {"layers": 2, "heads": 4, "shared_heads": 2, "width": 64, "inner": 128, "words": 512},
    "100m": {"layers": 12, "heads": 10, "shared_heads": 2, "width": 640, "inner": 1728, "words": 32000},
}
PROMPTS = ("DeepSpeed is a machine learning framework", "He is working on", "He has a", "He got all")


class Attention(nn.Module):
    def __init__(self, width, heads, shared_heads):
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, shared_heads, width // heads
        self.num_key_value_groups = heads // shared_heads
        self.q_proj, self.o_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, shared_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shared_heads * self.head_dim, bias=False)

    def forward(self, x, cache):
        samples, tokens, _ = x.shape
        query = self.q_proj(x).view(samples, tokens, self.num_heads, -1).transpose(1, 2)
        new = [one(x).view(samples, tokens, self.num_key_value_heads, -1).transpose(1, 2)
               for one in (self.k_proj, self.v_proj)]  # fmt: skip
        if cache is not None:
            kept = cache.get(id(self))
            new = cache[id(self)] = new if kept is None else [torch.cat(pair, 2) for pair in zip(kept, new)]
        keys, values = (one.repeat_interleave(self.num_key_value_groups, 1) for one in new)
        scores = query @ keys.transpose(-1, -2) * self.head_dim**-0.5
        behind = keys.shape[2] - tokens + 1
        later = torch.ones(tokens, keys.shape[2], dtype=torch.bool, device=x.device).triu(behind)
        made = scores.masked_fill(later, -1e4).softmax(-1) @ values
        return self.o_proj(made.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, shared_heads, inner):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.self_attn = Attention(width, heads, shared_heads)
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x, cache=None):
        x = x + self.self_attn(self.norms[0](x), cache)
        y = self.norms[1](x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(y)) * self.up_proj(y))


class BuiltIn(nn.Module):
    """A small model of random weights."""

    def __init__(self, layers, heads, shared_heads, width, inner, words):
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList([Block(width, heads, shared_heads, inner) for _ in range(layers)])
        self.lm_head = nn.Linear(width, words, bias=False)

    def forward(self, input_ids, cache=None):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, cache)
        return self.lm_head(self.norm(x))

    @torch.no_grad()
    def generate(self, input_ids, max_new_tokens):
        """``input_ids`` and the likeliest next tokens."""
        cache, new = {}, input_ids
        for _ in range(max_new_tokens):
            new = self.forward(new, cache)[:, -1].argmax(-1, keepdim=True)
            input_ids = torch.cat([input_ids, new], 1)
        return input_ids


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="tiny", help=f"of {', '.join(BUILT_IN)}, or a model of transformers")
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--ds_inference", action="store_true", help="through deepspeed.init_inference")
    parser.add_argument("--max_new_tokens", type=int, default=50)
    parser.add_argument("--test_performance", action="store_true", help="times, and not only the text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--local_rank", type=int, default=0, help="what launchers add; has no effect")
    return parser.parse_args()


def model_and_inputs(args, dtype):
    """``(model, arguments of generate, a function that makes text of tokens)``."""
    if args.name in BUILT_IN:
        torch.manual_seed(0)
        model = BuiltIn(**BUILT_IN[args.name])
        given = {"input_ids": torch.randint(0, 256, (args.batch_size, 16))}
        return model, given, lambda tokens: str(tokens.tolist())
    if transformers is None:
        raise SystemExit(f"--name {args.name} needs transformers: install it, or choose one of {', '.join(BUILT_IN)}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.name, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(args.batch_size)]
    model = transformers.AutoModelForCausalLM.from_pretrained(args.name, torch_dtype=dtype)
    given = tokenizer(prompts, return_tensors="pt", padding=True)
    return model, {**given, "do_sample": False}, lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)


def peak_bytes(device):
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return get_accelerator().max_memory_allocated()


def main():
    args = parse_arguments()
    dtype, world = getattr(torch, args.dtype), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        deepspeed.init_distributed()
    device = torch.device(get_accelerator().current_device_name())
    model, given, text_of = model_and_inputs(args, dtype)
    if args.ds_inference:
        model = deepspeed.init_inference(model, dtype=dtype, tensor_parallel={"tp_size": world})
    else:
        model = model.to(device, dtype).eval()
    given = {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in given.items()}
    times, before = [], given["input_ids"].shape[1]
    for _ in range(1 + (args.rounds if args.test_performance else 0)):
        get_accelerator().synchronize()
        start = time.perf_counter()
        made = model.generate(**given, max_new_tokens=args.max_new_tokens)
        get_accelerator().synchronize()
        times.append((time.perf_counter() - start) / (made.shape[1] - before))
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    for index, one in enumerate(made):
        print(f"text {index}: {text_of(one)}")
    if args.test_performance:
        latency = sum(times[1:]) / len(times[1:])
        weights = sum(param.numel() * param.element_size() for param in model.parameters())
        print(f"{args.name}, {args.dtype}, {world if args.ds_inference else 1} ranks share it, batch {args.batch_size}")
        print(f"Avg Per Token Latency: {1000 * latency:8.2f} ms")
        print(f"Avg BW: {weights / latency / 1e9:8.2f} GB/s")
        print(f"Avg Throughput: {args.batch_size / latency:8.2f} tokens/s")
        print(f"Peak Memory: {peak_bytes(device) / 1e9:8.2f} GB on this rank, {weights / 1e9:.2f} GB of them weights")


if __name__ == "__main__":
    main()
