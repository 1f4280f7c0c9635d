"""transformers' Trainer and accelerate on our engine, where they are installed: losses of a run without DeepSpeed."""

import importlib.util
import os

import pytest
import torch

from harness import run_ranks

MISSING = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
if not MISSING:
    import transformers

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")]
STEPS = 4


class Tokens(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = torch.randint(3, 64, (32, 12), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def config_of(stage, optimizer):
    """What users write: every number that the trainer knows is a blank."""
    names = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"]
    zero = {"stage": stage, "reduce_bucket_size": "auto"}
    if stage == 3:
        zero.update(stage3_prefetch_bucket_size="auto", stage3_param_persistence_threshold="auto")
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    found = {**dict.fromkeys(names, "auto"), "zero_optimization": zero, "bf16": {"enabled": "auto"}}
    if optimizer:
        blanks = dict.fromkeys(["lr", "betas", "eps", "weight_decay"], "auto")
        found["optimizer"] = {"type": "AdamW", "params": blanks}
    return found


def train(rank, world, folder, stage, optimizer, lora):
    more = {}
    if stage is not None:
        from accelerate import PartialState

        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")  # what accelerate would choose on a GPU; without one it has to be told
        more = {"deepspeed": config_of(stage, optimizer), "accelerator_config": {"use_configured_state": True}}
    arguments = transformers.TrainingArguments(
        output_dir=os.path.join(folder, "out"), per_device_train_batch_size=4 // world, gradient_accumulation_steps=2,
        max_steps=STEPS, learning_rate=1e-2, max_grad_norm=0.5, logging_steps=1, save_strategy="no", report_to=[],
        seed=11, use_cpu=stage is None, disable_tqdm=True, **more,
    )  # fmt: skip
    # Under stage 3 the parameters are sharded as they are made.
    model = transformers.AutoModelForCausalLM.from_pretrained(os.path.join(folder, "model"))
    assert all(hasattr(param, "ds_id") == (stage == 3) for param in model.parameters())
    if lora:
        import peft

        transformers.set_seed(5)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Tokens())
    trainer.train()
    trainer.save_model(os.path.join(folder, f"saved{stage}"))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients")
    transformers.set_seed(7)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).save_pretrained(folder / "model")
    return str(folder)


@pytest.fixture(scope="module")
def plain(model_folder):
    found = {}

    def losses(lora):
        if lora not in found:
            found[lora] = run_ranks(1, train, model_folder, None, False, lora, fresh=True, timeout=120)[0]
        return found[lora]

    return losses


@pytest.mark.parametrize("stage, optimizer", [(1, False), (2, True), (3, False), (3, True)])
def test_trainer(model_folder, plain, stage, optimizer):
    got = run_ranks(2, train, model_folder, stage, optimizer, False, fresh=True, timeout=120)
    assert len(got[0]) == STEPS and got[0] == pytest.approx(plain(False), abs=1e-5)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(os.path.join(model_folder, f"saved{stage}"))
    assert loaded.lm_head.weight.shape == (64, 32)


@pytest.mark.parametrize("stage", [2, 3])
def test_trainer_with_a_lora(model_folder, plain, stage):
    pytest.importorskip("peft", reason="peft is not installed")
    got = run_ranks(2, train, model_folder, stage, False, True, fresh=True, timeout=120)
    assert got[0] == pytest.approx(plain(True), abs=1e-5)
