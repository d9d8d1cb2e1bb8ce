"""The planner page says what Python says: 300 random inputs, its presets, its controls, in a browser that reaches nothing else."""

from __future__ import annotations

import json
import math
import random

import pytest

from browser import SITE, Visit, browser, served
from zerolab import planner, planning

pytestmark = pytest.mark.site
PAGE = "book/planner.html"
INPUTS = 300
MACHINES = list(planning.machines())
RUN = """async ([inputs, turns]) => {
  const engine = plannerEngine(), mine = new engine.Planner(engine.toPython(plannerData.machines)), texts = new Map();
  const listener = window.plannerFamily;
  window.plannerFamily = (name, text) => texts.set(name, text);
  const answers = [];
  for (const values of inputs) {
    try {
      const name = mine.needs(engine.toPython(values));
      if (!texts.has(name)) {
        await new Promise((resolve, reject) => {
          const script = document.createElement("script");
          script.src = `../_static/planner/${name}.js`;
          [script.onload, script.onerror] = [resolve, reject];
          document.head.append(script);
        });
        mine.learn(name, texts.get(name));
      }
      answers.push({ plan: engine.fromPython(mine.plan(engine.toPython(values), turns)) });
    } catch (error) {
      if (!error.args) throw error;
      answers.push({ error: error.message });
    }
  }
  window.plannerFamily = listener;
  return JSON.stringify(answers);
}"""


def python() -> planner.Planner:
    """The planner as Python runs it, with the families that the site ships."""
    found = planner.Planner(planning.machines())
    for path in (SITE / "_static" / "planner").glob("*.js"):
        if path.name != "engine.js":
            name, text = json.loads(f"[{path.read_text().strip().removeprefix('plannerFamily(').removesuffix(');')}]")
            found.learn(name, text)
    return found


def draws(count: int) -> list[dict]:
    draw, found = random.Random(20), []
    for _ in range(count):
        values = {}
        for control in planner.controls(MACHINES):
            if control.kind == "choice":
                values[control.key] = draw.choice(control.options)
            elif control.kind == "switch":
                values[control.key] = draw.random() < 0.5
            else:
                low, high = max(control.low, 1), {"seq": 4096, "accumulation": 4, "micro_batch": 8, "world": 64, "lora": 64}.get(control.key, control.high)
                number = math.exp(draw.uniform(math.log(low), math.log(high)))
                values[control.key] = 0 if control.low == 0 and draw.random() < 0.2 else round(number, 2) if control.fraction else int(number)
        found.append(values)
    found[3]["world"] = 0  # and what a reader may type wrong
    found[7]["seq"] = "many"
    return found


def difference(ours, theirs, at="plan"):
    """Where two JSON values first differ, None where they do not; floats may differ in the tenth digit."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if set(ours) != set(theirs):
            return f"{at}: keys {set(ours) ^ set(theirs)}"
        pairs = [(f"{at}.{key}", ours[key], theirs[key]) for key in ours]
    elif isinstance(ours, (list, tuple)) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return f"{at}: {len(ours)} items against {len(theirs)}"
        pairs = [(f"{at}[{i}]", *pair) for i, pair in enumerate(zip(ours, theirs))]
    else:
        numbers = isinstance(ours, (int, float)) and isinstance(theirs, (int, float)) and not isinstance(ours, bool)
        same = math.isclose(ours, theirs, rel_tol=1e-9) if numbers and isinstance(ours, float) else ours == theirs
        return None if same else f"{at}: {ours!r} against {theirs!r}"
    return next(filter(None, (difference(a, b, where) for where, a, b in pairs)), None)


@pytest.fixture(scope="module")
def site():
    if not (SITE / PAGE).exists():
        pytest.fail("there is no built book: make book")
    with served() as address, browser() as chromium:
        yield chromium, address


@pytest.fixture(scope="module")
def visit(site):
    with Visit(*site, PAGE) as seen:
        seen.page.wait_for_selector("#planner-result:not([hidden])", timeout=60_000)
        yield seen
        assert not seen.foreign and not seen.broken and not seen.errors


def test_the_page_says_what_python_says(visit):
    mine, inputs, wrong = python(), draws(INPUTS), 0
    for start in range(0, INPUTS, 20):
        some = inputs[start : start + 20]
        for values, answer in zip(some, json.loads(visit.page.evaluate(RUN, [some, False]))):
            try:
                ours = json.loads(json.dumps(mine.plan(values)))
            except ValueError as error:
                assert answer == {"error": str(error)}, values
                wrong += 1
                continue
            assert "plan" in answer, (answer, values)
            assert not difference(ours, answer["plan"]), (difference(ours, answer["plan"]), values)
    assert 2 <= wrong < INPUTS / 10


def test_one_change_at_a_time_too(visit):
    mine, inputs = python(), [values for values in draws(20) if values["world"] and values["seq"] != "many"][:6]
    for values, answer in zip(inputs, json.loads(visit.page.evaluate(RUN, [inputs, True]))):
        ours = json.loads(json.dumps(mine.plan(values, turns=True)))
        assert ours["turns"] and not difference(ours, answer["plan"]), (difference(ours, answer["plan"]), values)


def test_presets_fill_the_form_and_plan(visit):
    page, mine = visit.page, python()
    values = planner.start(MACHINES[0])
    for name in planner.presets(values["model"]):
        values |= planner.presets(values["model"])[name]
        page.select_option("#planner-preset", name)
        ours = json.loads(json.dumps(mine.plan(values)))
        page.wait_for_function(
            "peak => { const r = document.getElementById('planner-result'); return !r.hidden && JSON.parse(r.dataset.plan).memory.peak === peak }",
            arg=ours["memory"]["peak"],
            timeout=20_000,
        )
        assert not difference(ours, json.loads(page.get_attribute("#planner-result", "data-plan")))
    page.wait_for_selector("#planner-turns[data-turns]", timeout=60_000)
    assert "GiB on a card of" in page.inner_text("#planner-status")


def test_a_wrong_number_is_named_and_the_address_keeps_the_plan(visit):
    page = visit.page
    page.fill("#planner-world", "none")
    page.wait_for_function("document.getElementById('planner-status').textContent.includes('is no number')")
    assert page.get_attribute("#planner-world", "aria-invalid") == "true"
    page.fill("#planner-world", "8")
    page.wait_for_selector("#planner-result:not([hidden])")
    assert "world=8" in page.evaluate("location.hash")


def test_every_control_has_a_label_and_the_keyboard_reaches_it(visit):
    page = visit.page
    page.focus("#planner-preset")
    reached = set()
    for _ in range(2 * len(planner.controls(MACHINES))):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.name || ''"))
    assert {control.key for control in planner.controls(MACHINES)} <= reached
    assert page.evaluate("[...document.querySelectorAll('#planner input, #planner select')].every(field => field.labels.length)")


def test_it_fits_a_phone(site):
    with Visit(*site, PAGE, width=360) as seen:
        seen.page.wait_for_selector("#planner-result:not([hidden])", timeout=60_000)
        assert seen.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
