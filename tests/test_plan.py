"""`zerolab plan`: the counts that a real engine shows, auto values, what fits, and clear words where nothing can be planned."""

import json
from dataclasses import replace

import pytest

from test_cli import NOTE, zerolab
from zerolab import planning
from zerolab.experiment import ZerolabError
from zerolab.knobs import stage3_defaults
from zerolab.predict import fit, time
from zerolab.predict.config import arguments
from zerolab.predict.models import trace_of
from zerolab.predict.plan import TURNS, describe, plan
from zerolab.predict.schedule import schedule

MACHINE = planning.rates_of("h200-x2-nvlink")
BF16 = {"bf16": {"enabled": True}}


def planned(*options):
    done = zerolab("plan", "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def trace():
    return trace_of("tiny", lora=8, checkpointing="non-reentrant", seq=64)


def test_the_notes_config(tmp_path):
    config = tmp_path / "note.json"
    config.write_text(NOTE)
    options = ("--config", config, "--lora", 8, "--checkpointing", "--accumulation", 16, "--gpu-memory", "16GiB", "--link", "pcie-shm")
    found = planned(*options)
    counts = {(op, phase): count for op, phase, count, *_ in found["collectives"]}
    # shared/claims.md's own run of the real engine: 272 + 223 + 769 gathers a step of one micro-step
    assert counts["all_gather", "step"] == 769 and counts["all_gather", "forward"] % 16 == 0
    assert 2.7 < found["passes"] < 3 and found["fits"] is True
    assert found["seconds"]["lower"] <= found["seconds"]["expected"] <= found["seconds"]["upper"]
    assert planned(*options[:-4], "--gpu-memory", "8GiB")["fits"] is False
    text = zerolab("plan", *options)
    assert text.returncode == 0 and "fits 16.00 GiB" in text.stdout and "one change at a time" in text.stdout


def test_a_hugging_face_config(tmp_path):
    """A folder with transformers' config.json, "auto" values, HJSON comments."""
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 256, **small}))
    auto = '{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto" /* hidden² */}}'
    (tmp_path / "ds.json").write_text(auto)
    found = planned("--config", tmp_path / "ds.json", "--model", tmp_path, "--lora", 4, "--seq", 32)
    assert found["memory"]["between"]["reduce bucket"] == 2 * 64 * 64
    assert found["model"]["tensors"] > 50
    refused = zerolab("plan", "--config", tmp_path / "ds.json", "--model", tmp_path, "--launcher", "deepspeed")
    assert refused.returncode == 1 and "zero_optimization.reduce_bucket_size" in refused.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", "gpt-17"), "neither a config.json"),
        (("--machine", "abacus"), "zerolab calibrate"),
        (("--gpu-memory", "much"), "16GiB"),
        (("--config", "absent.json"), "No such file"),
    ],
)
def test_clear_words(options, words):
    done = zerolab("plan", *options)
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr


def test_what_cannot_be_followed(tmp_path):
    for zero, words in (({"stage": 2}, "stage is 2"), ({"stage3_typo": 1}, "unknown to DeepSpeed"), ({"zero_hpz_partition_size": 2}, "not followed")):
        (tmp_path / "c.json").write_text(json.dumps({"zero_optimization": zero, **BF16}))
        done = zerolab("plan", "--config", tmp_path / "c.json", "--model", "tiny")
        assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_auto_and_sections():
    config = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}, "train_micro_batch_size_per_gpu": "auto"}
    found = planning.resolved(config, "tiny", "hf", None, 4)
    assert found["zero_optimization"]["reduce_bucket_size"] == 256 * 256
    assert found["train_micro_batch_size_per_gpu"] == 1 and found["gradient_accumulation_steps"] == 4
    assert arguments(found)["dtype"] == "bf16"
    assert arguments(planning.resolved({"fp16": {"enabled": True}}, "tiny", "hf", None, None))["dtype"] == "fp16"
    assert planning.size("16GiB") == 2**34 and planning.size("24 GB") == 24e9 and planning.size("80e9") == 80e9
    with pytest.raises(ZerolabError):
        planning.size("")


def test_turns_say_what_a_change_does(trace):
    found = plan(trace, BF16, 4, MACHINE)
    turns = {(t["key"], json.dumps(t["value"])): t for t in found["turns"]}
    assert 5 < len(turns) < len(TURNS)
    assert not any(turn["value"] == stage3_defaults()[turn["key"]] for turn in found["turns"])  # a default is no change
    effects = [abs(t["time"] - 1) for t in found["turns"]]
    assert effects == sorted(effects, reverse=True)
    offload = next(t for (key, _), t in turns.items() if key == "offload_param")
    assert offload["memory"] < 0 < offload["time"] - 1
    assert "peak" in describe(found)


def test_lanes(trace):
    """More link, less time; what overlaps lies between the bounds; accumulation multiplies."""
    fast, slow = MACHINE, MACHINE.linked(planning.rates_of("h200-x2-shm"))

    def seconds(machine, **more):
        step = schedule(trace, world=4, machine=machine, keep=True, **{"config": {}, **more}).steady
        low, high = time.bounds(step.busy)
        total = sum(step.seconds.values())
        assert 0.95 * low <= total <= high * 1.0001  # phases begin together, which can only lengthen a step
        assert sum(b - a for a, b in step.lanes["link"]) == pytest.approx(step.busy["link"])
        return total

    assert seconds(fast) <= seconds(slow)
    assert seconds(fast, accumulation=4) > 3 * seconds(fast)
    offloaded = {"offload_param": {"device": "cpu", "pin_memory": True}}
    assert seconds(fast, config=offloaded) > seconds(fast)
    assert seconds(fast, config={"offload_param": {"device": "cpu"}}) == seconds(fast, config=offloaded)  # DeepSpeed's default
    pageable = {"offload_param": {"device": "cpu", "pin_memory": False}}
    assert seconds(fast, config=pageable) > seconds(fast, config=offloaded)


def test_one_card_waits_for_its_copies(trace):
    """The host stops until every pinned copy asked for so far has ended: a little prefetch hides some, a large one hides none."""

    def step(prefetch):
        config = {"offload_param": {"device": "cpu", "pin_memory": True}, "stage3_param_persistence_threshold": 0}
        config["stage3_prefetch_bucket_size"] = prefetch
        found = schedule(trace, world=1, machine=replace(MACHINE, pinned=1e8), config=config).steady
        return sum(found.seconds.values()), found.busy

    none, busy = step(0)
    assert busy["copies"] > 0 and none >= busy["host"] + busy["copies"]
    some, busy = step(10_000)
    assert max(busy.values()) < some < none
    assert some < step(int(5e8))[0]


def test_fit_finds_costs_again():
    import random

    draw = random.Random(7)
    costs = {"operators": 2e-5, "hooks": 1e-4, "collectives": 3e-4, "parameters": 5e-5, "tiles": 1e-3}
    rows = []
    for _ in range(40):
        features = {cost: draw.randrange(1, 4000) for cost in costs}
        rows.append({"features": features, "seconds": sum(costs[c] * features[c] for c in costs)})
    assert fit.fit(rows) == pytest.approx(costs, rel=1e-6)
