"""Reports: round trip, comparison, and intervals that cover what they should."""

import math
import random

import pytest

from zerolab import Report, compare
from zerolab.report import paired_ratio
from zerolab.trace import Collective, by_phase, difference, wire_bytes

COLLECTIVES = [
    Collective("all_gather", 80, 160, "forward", 0),
    Collective("all_gather", 80, 160, "backward", 0),
    Collective("reduce_scatter", 100, 200, "backward", 0),
    Collective("all_reduce", 1, 4, "step", 0),
]
PROVENANCE = {
    "tier": "cpu", "world": 4, "devices": ["x"], "link": "gloo", "cores": 2, "threads": 1,
    "versions": {"deepspeed": "1", "torch": "2"}, "commit": "abc", "date": "today", "command": "zerolab run 05",
}  # fmt: skip


def variant(times):
    return {
        "status": "ok",
        "variant": {"zero": {}, "accumulation": 1},
        "collectives": [[list(c) for c in COLLECTIVES]],
        "model": {"elements": 80},
        "times": [[{"total": t, "forward": t / 2, "backward": t / 2, "step": 0}] for t in times],
    }


def report(slow):
    return Report("r", {}, PROVENANCE, {"base": variant([1.0, 1.1, 0.9]), "slow": variant(slow)})


def test_a_saved_report_loads_as_it_was(tmp_path):
    saved = report([2.0, 2.2, 1.8])
    loaded = Report.load(saved.save(tmp_path / "deep" / "r.json"))
    assert loaded.to_json() == saved.to_json()
    assert loaded["slow"].collectives() == COLLECTIVES
    assert loaded["slow"].passes == 2.0
    assert not list((tmp_path / "deep").glob("*.tmp"))
    (tmp_path / "other.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99"):
        Report.load(tmp_path / "other.json")


def test_ratios_pair_rounds():
    ratio = report([2.0, 2.2, 1.8]).ratio("slow")
    assert math.isclose(ratio.value, 2.0) and math.isclose(ratio.low, 2.0) and ratio.sure
    with pytest.raises(LookupError, match="was not timed"):
        Report("r", {}, PROVENANCE, {"base": {"status": "died", "message": "gone"}}).ratio("base")


def test_the_interval_of_equal_times_covers_one_as_often_as_it_says():
    """1,000 simulated A/A comparisons of 6 noisy rounds: 95 % of the intervals hold 1, give or take sampling error."""
    draw = random.Random(0)
    covered = 0
    for _ in range(1000):
        rounds = [(draw.lognormvariate(0, 0.2), draw.lognormvariate(0, 0.2)) for _ in range(6)]
        covered += not paired_ratio([a for a, _ in rounds], [b for _, b in rounds]).sure
    assert 930 <= covered <= 970


def test_compare_says_what_two_reports_share():
    a, b = report([2.0, 2.2, 1.8]), report([3.0, 3.3, 2.7])
    b["slow"].data["collectives"] = [[list(c) for c in COLLECTIVES[:-1]]]
    rows = {row["variant"]: row for row in compare(a, b)}
    assert rows["base"]["counts_equal"] is True and rows["slow"]["counts_equal"] is False
    assert [round(r.value, 3) for r in rows["slow"]["ratio"]] == [2.0, 3.0]


def test_traces_are_compared_by_what_is_exact():
    later = [c._replace(start=1.0, end=2.0) for c in COLLECTIVES]
    assert difference(COLLECTIVES, later) == ""
    assert "part at number 2" in difference(COLLECTIVES, [*COLLECTIVES[:2], COLLECTIVES[3]])
    assert "another order" in difference(COLLECTIVES, [COLLECTIVES[1], COLLECTIVES[0], *COLLECTIVES[2:]])
    assert by_phase(COLLECTIVES)["all_gather", "forward"] == (1, 80, 160)
    assert wire_bytes(COLLECTIVES, 4) == (160 + 160 + 200 + 2 * 4) * 3 / 4
