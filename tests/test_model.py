"""The labs' decoder against the real one: same elements, and the same collectives whatever the config."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config

from zerolab import model
from zerolab.predict import schedule
from zerolab.predict.capture import capture, numbered
from zerolab.trace import difference

WIDTHS = model.shape("qwen2.5-14b", 32, layers=3)
CONFIG = Qwen2Config(
    hidden_size=WIDTHS["hidden"], intermediate_size=WIDTHS["ffn"], num_hidden_layers=3, vocab_size=WIDTHS["vocab"],
    num_attention_heads=WIDTHS["heads"], num_key_value_heads=WIDTHS["kv_heads"], tie_word_embeddings=False, use_cache=False,
)  # fmt: skip


def theirs(lora, checkpointing):
    with torch.device("meta"), numbered():
        module = AutoModelForCausalLM.from_config(CONFIG)
        if lora:
            targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            module = get_peft_model(module, LoraConfig(r=lora, lora_alpha=2 * lora, target_modules=targets))
        if checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
            if lora:
                module.enable_input_require_grads()
    module.train()
    ids = torch.zeros(1, 8, dtype=torch.long, device="meta")
    return module, lambda: {"input_ids": ids, "labels": ids}


def ours(lora, checkpointing):
    with torch.device("meta"), numbered():
        module = model.build("qwen2.5-14b", 32, lora=lora, checkpointing=checkpointing, layers=3)
    return module, lambda: module.batch(1, 8, "meta", 0)


CONFIGS = [
    {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0},
    {"stage3_prefetch_bucket_size": 20_000, "stage3_max_live_parameters": 200_000, "stage3_param_persistence_threshold": 500},
    {"stage3_prefetch_bucket_size": 500_000, "stage3_max_reuse_distance": 100_000, "reduce_bucket_size": 50_000},
]


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("checkpointing", [None, "non-reentrant"])
def test_same_schedule_as_transformers_and_peft(lora, checkpointing):
    real, labs = (capture(*built(lora, checkpointing)) for built in (theirs, ours))
    assert sorted(p.elements for p in real.parameters) == sorted(p.elements for p in labs.parameters)
    for config in CONFIGS:
        a, b = schedule(real, config), schedule(labs, config)
        for step_a, step_b in zip(a.steps, b.steps):
            assert not difference(step_a.collectives, step_b.collectives)


def test_published_sizes():
    with torch.device("meta"):
        elements = {size: sum(p.numel() for p in model.build(size).parameters()) for size in model.SIZES}
    # Model cards and config.json of each: Qwen2.5-14B and 7B and 0.5B, Llama 3 8B.
    assert elements["qwen2.5-14b"] == 14_770_033_664
    assert elements["qwen2.5-7b"] == 7_615_616_512
    assert elements["qwen2.5-0.5b"] == 494_032_768
    assert elements["llama-3-8b"] == 8_030_261_248


@pytest.mark.parametrize("checkpointing", model.CHECKPOINTING)
@pytest.mark.parametrize("lora", [0, 2])
def test_it_trains(lora, checkpointing):
    torch.manual_seed(0)
    module = model.build("tiny", layers=2, lora=lora, checkpointing=checkpointing, hidden=32, ffn=64, vocab=64)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(12):
        loss = module(*module.batch(4, 16, "cpu", 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_unknown_things_are_named():
    with pytest.raises(KeyError, match="unknown model size 'x'; known: "):
        model.shape("x")
    with pytest.raises(ValueError, match="do not divide by 7"):
        model.shape("tiny", 7)
    with pytest.raises(ValueError, match="checkpointing must be one of"):
        model.build(checkpointing="sometimes")
