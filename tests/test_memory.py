"""Predicted memory against the recorded GPU runs, and against the shards that a real engine holds."""

import statistics

import pytest

from zerolab import report
from zerolab.experiment import Experiment
from zerolab.predict.config import arguments
from zerolab.predict.memory import memory
from zerolab.predict.schedule import schedule
from zerolab.predict.specs import trace_of
from zerolab.ranks.engine import ds_config


def predicted(spec, world):
    wanted = arguments(ds_config(spec))
    trace = trace_of(spec)
    done = schedule(trace, world=world, **wanted)
    return memory(trace, done, wanted["config"], wanted["dtype"], torch_adam=True)


def recorded():
    for folder in report.recorded_machines():
        for path in sorted((report.RESULTS / folder).glob("[0-9]*.json")):
            found = report.Report.load(path)
            for variant in found:
                if variant.memory.get("allocated"):
                    yield folder, found, variant


def test_recorded_peaks():
    """Goal of the course: median error at most 5 %, worst at most 10 %. What it reaches is far better; hold it there."""
    errors = {}
    for folder, found, variant in recorded():
        peak = predicted(variant.data["variant"], found.provenance["world"]).peak
        errors[folder, found.name, variant.name] = peak / variant.memory["allocated"] - 1
    assert len(errors) > 40
    sizes = {key: abs(e) for key, e in errors.items()}
    worst = max(sizes, key=sizes.get)
    assert sizes[worst] < 0.01, (worst, errors[worst])
    assert statistics.median(sizes.values()) < 0.002


@pytest.mark.parametrize(
    "zero", [{}, {"offload_optimizer": {"device": "cpu"}}, {"offload_param": {"device": "cpu"}}, {"sub_group_size": 1e5}]
)
def test_what_lies_there_between_steps(zero):
    """Bytes of every part as the engine's own tensors have them, on four ranks."""
    experiment = Experiment("memory", {"a": zero}, model={"size": "tiny", "layers": 3, "lora": 4}, seq=16, rounds=0, watch=())
    held = experiment.run(save=False, progress=False)["a"].holdings
    found = predicted(experiment.spec("a"), 4)
    names = {"parameters": "parameters", "gradients": "gradients", "master weights": "master", "optimizer states": "optimizer"}
    total = {part: found.between.get(part, 0) + found.host.get(part, 0) for part in names}
    if "offload_optimizer" in zero:
        total["gradients"] -= held["master_gradients"]["bytes"]  # 32-bit gradients, which the prediction counts among gradients
    assert total == {part: held[name]["bytes"] for part, name in names.items()}
    assert found.between["reduce bucket"] == held["gradient_buffer"]["bytes"]


def test_a_peak_is_the_sum_of_its_parts():
    experiment = Experiment("memory", {"a": {}}, model={"size": "tiny", "checkpointing": "non-reentrant"}, rounds=0)
    found = predicted(experiment.spec("a"), 4)
    assert found.peak == sum(found.parts.values()) == max(sum(p.values()) for p in found.peaks.values()) + sum(found.between.values())


def test_checkpointing_saves_activations():
    kinds = [None, "non-reentrant"]
    variants = {str(kind): {"model": {"size": "tiny", "checkpointing": kind}} for kind in kinds}
    experiment = Experiment("memory", variants, seq=512, rounds=0)
    without, with_ = (predicted(experiment.spec(v), 4).parts["activations"] for v in variants)
    assert with_ < without / 2
