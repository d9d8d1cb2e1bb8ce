"""Real DeepSpeed engines on gloo ranks: what a report holds, and that watching and clocking see the same training."""

import math

import pytest

from zerolab import Experiment, ZerolabError, lab
from zerolab.experiment import call
from zerolab.trace import difference
from zerolab.tunnel import shrink

TINY = {"size": "tiny", "layers": 1}
EVERYTHING_GATHERED = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}


@pytest.fixture(scope="module")
def report():
    variants = {"one bucket": {"reduce_bucket_size": 1e7}, "small": {"reduce_bucket_size": 1e4}}
    experiment = Experiment("e", variants, model=TINY, base=EVERYTHING_GATHERED, seq=8, rounds=2, steps=1)
    return experiment.run(save=False, progress=False)


def test_counts_are_those_of_the_model(report):
    for v in report:
        assert v.ok
        assert v.count("all_gather", "backward") > 0
        assert v.elements("reduce_scatter") == v.model["elements"] == v.model["trainable"]
        assert v.elements("all_gather", "forward") == v.model["elements"]
        assert v.passes == 2.0
        assert v.kept == 0 and v.peak_resident >= v.model["largest"]
    assert report["one bucket"].count("reduce_scatter") == 1
    assert report["small"].count("reduce_scatter") > 1


def test_bytes_follow_from_the_shard(report):
    v = report["one bucket"]
    shard = sum(math.ceil(n / 4) for n in [v.model["elements"]])
    assert v.holdings["parameters"]["bytes"] == 2 * shard
    assert v.holdings["gradients"]["bytes"] == 2 * shard
    assert v.holdings["master"]["bytes"] == 4 * shard
    assert v.holdings["optimizer"]["bytes"] == 8 * shard
    assert v.holdings["gradient_buffer"]["bytes"] == 2 * 10**7
    assert v.memory["step"] > 0 and v.memory["forward"] > 0


def test_times_and_provenance_are_there(report):
    v = report["small"]
    assert len(v.times()) == 2 and all(t > 0 for t in v.times())
    assert v.seconds("forward") + v.seconds("backward") + v.seconds("step") <= v.seconds() * 1.01
    assert report.ratio("small").rounds == 2
    for key in ("tier", "devices", "link", "versions", "commit", "date", "command"):
        assert report.provenance[key]
    lanes = v.data["timeline"]["lanes"]
    assert lanes["compute"] and lanes["link"]
    assert all(start <= end for lane in lanes.values() for start, end in lane)


def test_the_prediction_is_the_measurement(report):
    experiment = Experiment("e", {v.name: v.data["variant"]["zero"] for v in report}, model=TINY, seq=8)
    for name, schedule in experiment.predict().items():
        for step in range(3):
            assert not difference(schedule.steps[step].collectives, report[name].collectives(step))
        assert schedule.steady.peak_resident == report[name].peak_resident


def test_two_and_three_ranks_and_accumulation():
    for world in (2, 3):
        experiment = Experiment("w", {"a": {"accumulation": 2}}, model=TINY, world=world, rounds=0, watch=(), seq=8)
        v = experiment.run(save=False, progress=False)["a"]
        assert v.ok and v.data["world"] == world
        assert {c.micro for c in v.collectives()} == {0, 1}
        assert not difference(experiment.predict()["a"].steady.collectives, v.collectives())


def test_an_emulated_wire_delays_but_changes_no_collective():
    slow = {"latency": 0.02, "bandwidth": 1e9}
    variants = {"real": {}, "emulated": {"wire": slow}}
    r = Experiment("w", variants, model=TINY, base=EVERYTHING_GATHERED, seq=8, rounds=2, steps=1, watch=()).run(save=False, progress=False)
    assert not difference(r["real"].collectives(), r["emulated"].collectives())
    carried = sum(c.elements > 1 for c in r["emulated"].collectives())
    assert min(r["emulated"].times()) > carried * slow["latency"]  # one link: transfers queue


def test_a_function_runs_on_every_rank():
    values = call({"call": "on_ranks:identity", "arguments": {"word": "x"}}, world=2)
    assert values == [["x", 0, 2, "cpu"], ["x", 1, 2, "cpu"]]


def test_an_experiment_that_cannot_be_is_refused():
    with pytest.raises(ZerolabError, match="warmup must be at least 3"):
        Experiment("e", {"a": {}}, warmup=2)
    with pytest.raises(ZerolabError, match="at least one variant"):
        Experiment("e", {})


def test_the_tunnel_divides_sizes_and_defaults_alike():
    small = shrink({"reduce_bucket_size": 5e8, "stage3_max_live_parameters": 0}, 32)
    assert small["reduce_bucket_size"] == 488281
    assert small["stage3_prefetch_bucket_size"] == 48828  # the default, which the config does not name
    assert small["stage3_max_live_parameters"] == 0
    assert small["stage3_param_persistence_threshold"] == 3125
    assert shrink({"reduce_bucket_size": 1}, 32)["reduce_bucket_size"] == 1
    assert shrink({"reduce_bucket_size": 5e8}, 1) == {"reduce_bucket_size": 5e8}


def test_engines_of_one_group_each_have_their_own_linear():
    """zero.Init replaces linear() for the whole process. A plain one keeps gathered weights alive through what autograd saves."""
    variants = {"efficient": {}, "plain": {"memory_efficient_linear": False}, "efficient again": {}}
    experiment = Experiment("e", variants, model={**TINY, "layers": 2}, base=EVERYTHING_GATHERED, seq=8, rounds=0, watch=("memory",), fresh=False)
    first, plain, again = experiment.run(save=False, progress=False)
    # A CPU rank's peak depends a little on when gloo's threads let go of a buffer.
    assert plain.memory["forward"] > 1.5 * max(first.memory["forward"], again.memory["forward"])


@pytest.mark.parametrize("number", lab.files())
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_lab_can_be_set_up_where_there_are_gpus(monkeypatch, number, world):
    monkeypatch.setattr("zerolab.machine.gpus", lambda: ("NVIDIA H200",) * 4)
    monkeypatch.setenv("ZEROLAB_WORLD", str(world))
    for experiment in lab.experiments(number):
        assert all(experiment.spec(v)["model"] for v in experiment.variants)


@pytest.mark.parametrize("offload", [{}, {"offload_param": {"device": "cpu", "pin_memory": True}}])
def test_one_rank_gathers_nothing(offload):
    """DeepSpeed's NoGatherHandle: parameters are handed over, or fetched from the host."""
    variants = {"plain": {}, "accumulation": {"accumulation": 2}}
    experiment = Experiment("e", variants, model={**TINY, "layers": 2}, base=offload, world=1, seq=8, rounds=0, watch=(), fresh=False)
    report = experiment.run(save=False, progress=False)
    assert experiment.confirm(report) == list(variants)
    assert report["plain"].count("all_gather") == 0 and report["plain"].count("reduce_scatter") > 0


def test_memory_on_gpus_wants_a_fresh_group(monkeypatch):
    monkeypatch.setattr("zerolab.machine.tier", lambda world: "gpu")
    assert Experiment("e", {"a": {}}, watch=("memory",), fresh=False).fresh
    assert not Experiment("e", {"a": {}}, watch=(), fresh=False).fresh


def test_foretold_variants_are_predicted_and_what_ran_confirms_them():
    variants = {"run": {}, "foretold": {"reduce_bucket_size": 1e4}}
    experiment = Experiment("e", variants, model={**TINY, "layers": 2}, base=EVERYTHING_GATHERED, seq=8, rounds=0, watch=(), fresh=False)
    report = experiment.replace(foretold=("foretold",)).run(save=False, progress=False)
    assert [v.foretold for v in report] == [False, True] and experiment.replace(foretold=("foretold",)).confirm(report) == ["run"]
    real = experiment.run(save=False, progress=False)
    for ours, theirs in zip(report, real):
        assert [c.key for c in ours.collectives()] == [c.key for c in theirs.collectives()]
        assert (ours.peak_resident, ours.kept, ours.tiles, ours.model) == (theirs.peak_resident, theirs.kept, theirs.tiles, theirs.model)
    report["run"].data["collectives"][-1].pop()
    with pytest.raises(AssertionError, match="run, step 2"):
        experiment.confirm(report)
