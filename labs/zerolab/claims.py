"""The note's statements, each with a verdict and its evidence: one data file (claims.yml), one table a chapter.

An entry: `n`, `chapter`, `says` (the note's statement, in English), `verdict`, `truth`, and evidence: `source` ([file, snippet], whose
line is looked up in the installed DeepSpeed) and/or `assert` ([lab, text of an assertion in it]). `truth` is a jinja2 template:
numbers in it are computed from results or read from DeepSpeed, never typed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jinja2
import yaml

from zerolab import figures, knobs, lab, model, report

FILE = Path(__file__).with_name("claims.yml")
VERDICTS = (
    "right",
    "half right",
    "depends",
    "misleading",
    "wrong",
    "not shown here",
    "missing",
)


@cache
def load() -> tuple[dict, ...]:
    """All entries in the note's order. Raises ValueError for an unknown verdict or an entry without evidence."""
    entries = sorted(yaml.safe_load(FILE.read_text()), key=lambda entry: float(str(entry["n"]).rstrip("b") + (".5" if "b" in str(entry["n"]) else "")))
    for entry in entries:
        if entry["verdict"] not in VERDICTS:
            raise ValueError(f"claim {entry['n']}: verdict {entry['verdict']!r} is none of {VERDICTS}")
        if not (entry.get("source") or entry.get("assert") or entry.get("because")):
            raise ValueError(f"claim {entry['n']} has no evidence")
    return tuple(entries)


def environment() -> jinja2.Environment:
    """What `truth` templates may use: run(name), knob(name), elements(size), human, gib, and the note's own numbers."""
    env = jinja2.Environment(undefined=jinja2.StrictUndefined)
    env.globals.update(
        run=cache(report.load),
        knob=knobs.knob,
        shape=model.shape,
        human=figures.human,
        gib=figures.gib,
        len=len,
        round=round,
    )
    return env


def truth(entry: dict) -> str:
    """The entry's explanation with its numbers filled in."""
    return environment().from_string(entry["truth"]).render()


def evidence(entry: dict) -> list[str]:
    """Lines that say where it was read or asserted. Raises LookupError when the source or the lab no longer says so."""
    found = []
    sources = entry.get("source") or []
    for path, snippet in [sources] if sources and isinstance(sources[0], str) else sources:
        found.append(knobs.cite(path, snippet))
    for number, text in entry.get("assert") or []:
        if text not in lab.files()[number].read_text():
            raise LookupError(f"claim {entry['n']}: lab {number} no longer asserts {text!r}")
        found.append(f"lab {int(number)}, asserted")
    if entry.get("because"):
        found.append(entry["because"])
    return found


def table(chapter: int | None = None):
    """The statements of one chapter (None: all) as an HTML table."""
    rows = []
    for entry in load():
        if chapter in (None, entry["chapter"]):
            row = {"#": entry["n"], "the note says": entry["says"], "verdict": entry["verdict"], "what is so": truth(entry)}
            row["evidence"] = "; ".join(evidence(entry))
            rows.append(row)
    return figures.table(rows)


def tally() -> dict[str, int]:
    """{verdict: how many}, most severe last."""
    return {v: sum(e["verdict"] == v for e in load()) for v in VERDICTS}

