"""Every fault ends in one clear message within its limit, leaves no process, and keeps what was measured before."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from zerolab import Experiment, Report, ZerolabError, ranks
from zerolab.experiment import _one_at_a_time

SMALL = {"model": {"size": "tiny", "layers": 1}, "rounds": 0, "watch": (), "seq": 8}
GOOD = {"reduce_bucket_size": 1e6}


def rank_processes() -> list[psutil.Process]:
    """Living children of this process's leaders: there must be none once a run is over."""
    found = []
    for leader in ranks._leaders.values():
        if leader.alive():
            found += psutil.Process(leader.process.pid).children(recursive=True)
    return [p for p in found if p.status() != psutil.STATUS_ZOMBIE]


def run(variants, **changes):
    report = Experiment("faults", variants, **{**SMALL, **changes}).run(save=False, progress=False)
    assert not rank_processes()
    return report


def faulty(kind, **options):
    return {**GOOD, "model": {"factory": "faulty:build", "kind": kind, "size": None, "layers": None} | options}


@pytest.fixture(autouse=True)
def plain_specs(monkeypatch):
    """The faulty factory takes no sizes: drop what the experiment's model would add."""
    original = Experiment.spec

    def spec(self, label):
        found = original(self, label)
        if "factory" in found["model"]:
            found["model"] = {k: v for k, v in found["model"].items() if k not in ("size", "layers")}
        return found

    monkeypatch.setattr(Experiment, "spec", spec)


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        ("kill", "died", "rank 1 was killed (SIGKILL)"),
        ("raise", "failed", "ArithmeticError: the model's own mistake"),
        ("memory", "out of memory", "can't allocate memory"),
    ],
)
def test_one_variant_goes_wrong_and_the_others_go_on(kind, status, words):
    report = run({"before": GOOD, "faulty": faulty(kind), "after": GOOD})
    assert report["faulty"].status == status
    assert words in report["faulty"].message
    assert report["before"].ok and report["after"].ok
    assert report["after"].count("reduce_scatter") == report["before"].count("reduce_scatter") > 0


def test_a_rank_that_hangs_is_ended_at_the_limit():
    begin = time.monotonic()
    report = run({"faulty": faulty("hang"), "after": GOOD}, limit=6)
    assert time.monotonic() - begin < 60
    assert report["faulty"].status == "hung"
    assert "no sign of life for 6 s" in report["faulty"].message
    where = report["faulty"].log
    assert where.count("Current thread") == 4  # each rank's own lines, whole
    assert "faulty.py" in where
    assert report["after"].ok


def test_a_clocked_variant_that_dies_leaves_the_others_timed():
    report = run({"before": GOOD, "faulty": faulty("kill", at=5), "after": GOOD}, rounds=2, steps=1)
    assert report["faulty"].status == "died"
    assert len(report["before"].times()) == len(report["after"].times()) == 2


def test_a_cap_makes_the_large_bucket_run_out_of_memory():
    report = run({"large": {"reduce_bucket_size": 2e9}, "small": GOOD}, cap=3)
    assert report["large"].status == "out of memory"
    assert report["small"].ok


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        ({"reduce_bucket_size": 0}, "reduce_bucket_size: Input should be greater than 0 (got 0)"),
        ({"reduce_bukcet_size": 1e6}, "reduce_bukcet_size"),
        ({"stage3_prefetch_bucket_size": 3774873.6}, "stage3_prefetch_bucket_size"),
    ],
)
def test_a_rejected_config_is_named(zero, words):
    report = run({"mine": zero, "good": GOOD})
    assert report["mine"].status == "rejected"
    assert words in report["mine"].message
    assert report["good"].ok


def test_results_that_cannot_be_written_are_told_before_anything_runs(tmp_path):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    begin = time.monotonic()
    with pytest.raises(ZerolabError, match="cannot be written.*ZEROLAB_RESULTS"):
        Experiment("faults", {"good": GOOD}, **SMALL).run(save=blocked / "x.json", progress=False)
    assert time.monotonic() - begin < 2


def test_what_was_measured_before_a_fault_is_on_disk(tmp_path):
    path = tmp_path / "r.json"
    experiment = Experiment("faults", {"before": GOOD, "faulty": faulty("kill")}, **SMALL)
    experiment.run(save=path, progress=False)
    saved = Report.load(path)
    assert saved["before"].ok and saved["before"].collectives()
    assert saved["faulty"].status == "died"


def test_two_timed_runs_at_once(tmp_path, monkeypatch):
    monkeypatch.delenv("ZEROLAB_LOCK", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with _one_at_a_time(True):
        with pytest.raises(ZerolabError, match=f"process {os.getpid()}.*wait for it"):
            with _one_at_a_time(True):
                pass
        with _one_at_a_time(False):
            pass  # counting disturbs nobody


SCRIPT = textwrap.dedent(
    """
    import sys
    from zerolab import Experiment
    from zerolab import ranks
    experiment = Experiment("interrupted", {"a": {}, "b": {}}, model={"size": "tiny", "layers": 2}, rounds=400, steps=1)
    print(ranks.leader("cpu").process.pid, flush=True)
    ranks.leader("cpu").ready()
    print("ready", flush=True)
    experiment.run(save=sys.argv[1], progress=False)
    """
)


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_kernel_leaves_no_process(sig, tmp_path):
    environment = {**os.environ, "ZEROLAB_LOCK": "off"}
    kernel = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "r.json")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    leader = psutil.Process(int(kernel.stdout.readline()))
    assert kernel.stdout.readline().strip() == "ready"
    deadline = time.monotonic() + 60
    while len(leader.children()) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    everyone = [leader, *leader.children()]
    assert len(everyone) == 5
    time.sleep(1)
    kernel.send_signal(sig)
    kernel.wait(30)
    kernel.communicate()
    _, alive = psutil.wait_procs(everyone, timeout=20)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["complete"] is False


def test_the_leader_itself_dies(tmp_path):
    leader = ranks.leader("cpu")
    leader.ready()
    os.kill(leader.process.pid, signal.SIGKILL)
    leader.process.wait(10)
    assert run({"good": GOOD})["good"].ok  # a new one takes over
