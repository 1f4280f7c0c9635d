"""transformers, accelerate, peft and trl on our engine, where they are installed: results of a run without
DeepSpeed."""

import importlib.util
import os

import pytest
import torch

from harness import run_ranks
from runs import engine_of, take_step

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


def config_of(stage, optimizer, tensor=1, split=()):
    """The configuration that users write: every number that the trainer knows is a blank."""
    names = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"]
    zero = {"stage": stage, "reduce_bucket_size": "auto"}
    if stage == 3:
        zero.update(stage3_prefetch_bucket_size="auto", stage3_param_persistence_threshold="auto")
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    found = {**dict.fromkeys(names, "auto"), "zero_optimization": zero, "bf16": {"enabled": "auto"}}
    if tensor > 1:
        found["tensor_parallel"] = {"autotp_size": tensor, **dict(split)}
    if optimizer:
        blanks = dict.fromkeys(["lr", "betas", "eps", "weight_decay"], "auto")
        found["optimizer"] = {"type": "AdamW", "params": blanks}
    return found


def train(rank, world, folder, stage, optimizer, lora, tensor=1, split=(), zero=(), onebit=False):
    """``zero``: more keys of zero_optimization. ``onebit``: 1-bit Adam, which freezes after 2 steps."""
    more = {}
    if stage is not None:
        from accelerate import PartialState

        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")  # what accelerate would choose on a GPU; without one it has to be told
        given = config_of(stage, optimizer, tensor, split)
        given["zero_optimization"].update(dict(zero))
        if onebit:
            params = {"lr": "auto", "weight_decay": "auto", "freeze_step": 2, "bias_correction": True}
            given["optimizer"] = {"type": "OneBitAdam", "params": params}
        more = {"deepspeed": given}
        more["accelerator_config"] = {"use_configured_state": True}
    arguments = transformers.TrainingArguments(
        output_dir=os.path.join(folder, "out"), per_device_train_batch_size=4 * tensor // world,
        gradient_accumulation_steps=2,
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


ALL = {"vocab_parallel_lm_head": True, "split_sequence": True}


@pytest.mark.parametrize("stage, split", [(0, {}), (1, {}), (1, ALL)])
def test_trainer_whose_ranks_share_layers(model_folder, plain, stage, split):
    got = run_ranks(2, train, model_folder, stage, True, False, 2, split, fresh=True, timeout=120)
    assert got[0] == got[1] and got[0] == pytest.approx(plain(False), abs=1e-5)
    saved, wanted = (
        transformers.AutoModelForCausalLM.from_pretrained(os.path.join(model_folder, f"saved{one}")).state_dict()
        for one in (stage, None)
    )
    assert saved.keys() == wanted.keys()
    assert all(torch.allclose(saved[name], wanted[name], atol=1e-4) for name in wanted)


@pytest.mark.parametrize("stage", [2, 3])
def test_trainer_with_a_lora(model_folder, plain, stage):
    pytest.importorskip("peft", reason="peft is not installed")
    got = run_ranks(2, train, model_folder, stage, False, True, fresh=True, timeout=120)
    assert got[0] == pytest.approx(plain(True), abs=1e-5)


# ---- compressed communication ----------------------------------------------------------------------------------------
ZEROPP = {"zero_quantized_weights": True, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True}


def test_trainer_with_zeropp(model_folder, plain):
    got = run_ranks(2, train, model_folder, 3, True, False, 1, (), ZEROPP, fresh=True, timeout=120)
    assert got[0] == pytest.approx(plain(False), rel=0.01) and got[0] != pytest.approx(plain(False), abs=1e-6)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(os.path.join(model_folder, "saved3"))
    assert all(value.isfinite().all() for value in loaded.state_dict().values())


def test_trainer_with_coded_frozen_weights(model_folder, plain):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    codes = {"zero_quantized_nontrainable_weights": True}
    got = run_ranks(2, train, model_folder, 3, False, True, 1, (), codes, fresh=True, timeout=120)
    assert got[0] == pytest.approx(plain(True), rel=0.01)
    base = transformers.AutoModelForCausalLM.from_pretrained(os.path.join(model_folder, "model"))
    merged = peft.PeftModel.from_pretrained(base, os.path.join(model_folder, "saved3")).merge_and_unload()
    assert all(value.isfinite().all() for value in merged.state_dict().values())


def test_trainer_with_onebit_adam(model_folder, plain):
    """Two steps are AdamW's; the third is the first of signs."""
    got = run_ranks(2, train, model_folder, 0, True, False, 1, (), (), True, fresh=True, timeout=120)
    assert got[0][:3] == pytest.approx(plain(False)[:3], abs=1e-5) and got[0] == got[1]
    assert got[0][3] != pytest.approx(plain(False)[3], abs=1e-7) and got[0][3] < got[0][0]


# ---- accelerate: saving as its documentation says ------------------------------------------------------------
def save_tied(rank, world, folder):
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DeepSpeedPlugin

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "zero_optimization": zero}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = transformers.AutoModelForCausalLM.from_pretrained(os.path.join(folder, "tied"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(Tokens(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _, batch in zip(range(2), loader):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.unwrap_model(model).save_pretrained(
        os.path.join(folder, "saved_tied"),
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    full = model._zero3_consolidated_16bit_state_dict()
    return {name: value.tolist() for name, value in full.items()} if rank == 0 else None


def test_save_pretrained_of_tied_weights(model_folder):
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
    transformers.set_seed(7)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    made.save_pretrained(os.path.join(model_folder, "tied"))
    weights = run_ranks(2, save_tied, model_folder, fresh=True, timeout=120)[0]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(os.path.join(model_folder, "saved_tied"))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, torch.tensor(weights[name])), name
    assert not torch.equal(loaded.lm_head.weight, made.lm_head.weight)  # it was trained


# ---- trl -----------------------------------------------------------------------------------------------------
def prefer(rank, world, folder, stage, precompute):
    import datasets
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(61))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    more = {}
    if stage is not None:
        from accelerate import PartialState

        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        config = config_of(stage, False)
        if stage == 3:
            config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        more = {"deepspeed": config, "accelerator_config": {"use_configured_state": True}}
    arguments = trl.DPOConfig(
        output_dir=os.path.join(folder, "dpo"), per_device_train_batch_size=4 // world, max_steps=STEPS,
        learning_rate=1e-2, max_grad_norm=0.5, logging_steps=1, save_strategy="no", report_to=[], seed=11, bf16=False,
        precompute_ref_log_probs=precompute, use_cpu=stage is None, disable_tqdm=True, **more,
    )  # fmt: skip
    model, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(os.path.join(folder, "model")) for _ in range(2)
    )
    trainer = trl.DPOTrainer(
        model=model,
        ref_model=None if precompute else reference,
        args=arguments,
        train_dataset=datasets.load_from_disk(os.path.join(folder, f"pairs{stage}{precompute}")),
        processing_class=tokenizer,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("stage, precompute", [(2, True), (3, False), (3, True)])
def test_direct_preference_optimization(model_folder, stage, precompute):
    pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = [{"prompt": f"w{n} w{n + 1} ", "chosen": f"w{n + 2} w{n + 3}", "rejected": f"w{n + 5}"} for n in range(16)]
    for kind in (None, stage):
        folder = os.path.join(model_folder, f"pairs{kind}{precompute}")
        datasets.Dataset.from_list(rows).save_to_disk(folder)
    want = run_ranks(1, prefer, model_folder, None, precompute, fresh=True, timeout=120)[0]
    got = run_ranks(2, prefer, model_folder, stage, precompute, fresh=True, timeout=120)
    assert len(got[0]) == STEPS and got[0] == pytest.approx(want, abs=1e-5)


# ---- models whose initialisers look at parameters --------------------------------------------------------------

ZERO3 = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
AUDIO = {
    "WhisperForConditionalGeneration": {
        "vocab_size": 64, "num_mel_bins": 8, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "max_source_positions": 12, "max_target_positions": 20, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 3, "dropout": 0.0,
    },
    "Wav2Vec2ForCTC": {
        "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "layerdrop": 0.0,
        "intermediate_size": 32, "conv_dim": (16, 16), "conv_stride": (2, 2), "conv_kernel": (3, 3),
        "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
        "feat_proj_dropout": 0.0, "final_dropout": 0.0,
        "apply_spec_augment": False,
    },
}  # fmt: skip


def heard(name):
    random = torch.Generator().manual_seed(3)
    labels = torch.randint(4, 30, (1, 5), generator=random)
    if name.startswith("Whisper"):
        return {"input_features": torch.randn(1, 8, 24, generator=random), "labels": labels}
    return {"input_values": torch.randn(1, 200, generator=random), "labels": labels}


def listen(rank, world, folder, name):
    from transformers.integrations import HfDeepSpeedConfig

    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    kept = HfDeepSpeedConfig(ZERO3)
    model = getattr(transformers, name).from_pretrained(os.path.join(folder, name))
    assert kept.is_zero3() and all(param.ds_numel for param in model.parameters())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        start = {key: value.tolist() for key, value in model.state_dict().items()}
    engine = engine_of(model, ZERO3, model_parameters=model.parameters())
    losses = []
    for _ in range(2):
        losses.append(engine(**heard(name)).loss)
        take_step(engine, losses[-1])
    return start, [loss.item() for loss in losses]


@pytest.mark.parametrize("name", AUDIO)
def test_from_pretrained_of_models_for_speech(tmp_path, name):
    transformers.set_seed(7)
    cls = getattr(transformers, name)
    cls(cls.config_class(**AUDIO[name])).save_pretrained(tmp_path / name)
    model = cls.from_pretrained(tmp_path / name).train()
    state = {key: value.tolist() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        losses.append(model(**heard(name)).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    for start, got in run_ranks(2, listen, str(tmp_path), name, fresh=True, timeout=120):
        assert start == state
        # Losses of CTC are above 20, where neighbouring fp32 numbers differ by 2e-6.
        assert got == pytest.approx([loss.item() for loss in losses], rel=1e-5)
