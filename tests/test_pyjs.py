"""The planner page's engine without the page: what is outside pyjs's subset stops the build, and what is inside means what Python means."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "book" / "_ext"))

import planner as page  # noqa: E402
import pyjs  # noqa: E402
from browser import browser  # noqa: E402
from test_planner import difference, draws  # noqa: E402
from zerolab import planner, planning  # noqa: E402
from zerolab.predict import models  # noqa: E402

CONTAINERS = """
def look():
    a, said = {3, 1, 2}, []
    a.update([4, 4])
    a.difference_update([1, 9])
    a.discard(7)
    said.append([sorted(a), a.isdisjoint([1, 9]), a.isdisjoint((x for x in [9, 3])), len(a), sorted(a - {2}), sorted(a | {8})])
    d = dict.fromkeys("abc", 1)
    d.update({"z": 2})
    said.append([list(d.items()), d.pop("a"), d.get("a", 5), d.setdefault("y", 6), "y" in d])
    for _ in range(2):
        said.append(d.popitem())
    words = " Several words here ".strip().lower().split()
    said.append([words, "-".join(words), words.index("here"), words.count("words"), words.pop(0), words[-1:], words[0].replace("w", "s")])
    words.sort(key=len, reverse=True)
    words.extend([""])
    said.append([words, [bool(x) for x in ([], {}, set(), "", 0, [0])], 7 // -2, 7 % -2, words[0].startswith("w"), words[0].endswith("x")])
    return said
"""


@pytest.fixture(scope="module")
def blank():
    with browser() as chromium:
        yield chromium.new_page()


@pytest.mark.parametrize(
    "code, named",
    [
        ("def f(x):\n    return {1}.issubset(x)\n", "the attribute issubset"),
        ("def f(x):\n    return x.real\n", "the attribute real"),
        ("def f(x):\n    return hash(x)\n", "the name hash"),
        ("async def f(x):\n    return x\n", "AsyncFunctionDef"),
    ],
)
def test_outside_the_subset_stops_the_build(code, named):
    with pytest.raises(pyjs.Untranslatable, match=rf"mine, line \d: {named} is outside"):
        pyjs.bundle({"mine": code}, exports="mine")


def test_containers_mean_the_same(blank):
    space: dict = {}
    exec(CONTAINERS, space)
    engine = pyjs.bundle({"mine": CONTAINERS}, exports="mine")
    theirs = blank.evaluate(f"() => {{ const m = ({engine})(); return JSON.stringify(m.fromPython(m.look())); }}")
    assert json.loads(theirs) == json.loads(json.dumps(space["look"]()))


def test_plans_of_the_smallest_model(blank):
    mine, inputs = planner.Planner(planning.machines()), []
    for i, values in enumerate(draws(40)):
        if values["world"] and values["seq"] != "many":
            inputs.append({**values, "model": "tiny", "world": 1 if i % 4 == 0 else min(values["world"], 8)})
    families = {}
    for name, size, lora, kind in page.families():
        if size == "tiny":
            families[name] = models.family_of(size, lora, None if kind == "none" else kind).to_json()
            mine.learn(name, families[name])
    blank.set_content("<p>blank</p>")
    blank.evaluate(page.script() + "window.make = plannerEngine; window.machines = plannerData.machines;")
    answers = blank.evaluate(
        """([families, inputs]) => {
          const engine = make(), theirs = new engine.Planner(engine.toPython(machines));
          for (const [name, text] of Object.entries(families)) theirs.learn(name, text);
          return JSON.stringify(inputs.map((values) => engine.fromPython(theirs.plan(engine.toPython(values)))));
        }""",
        [families, inputs],
    )
    assert any(values["world"] == 1 and values["offload_param"] for values in inputs)
    for values, theirs in zip(inputs, json.loads(answers), strict=True):
        assert not (found := difference(json.loads(json.dumps(mine.plan(values))), theirs)), (found, values)
