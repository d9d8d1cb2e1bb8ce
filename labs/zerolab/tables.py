"""Tables of the course, as HTML, and numbers as a reader likes them. Like figures, they carry their provenance."""

from __future__ import annotations

import html
import math
import re

from zerolab import trace
from zerolab.report import Report


def human(number: float, unit: str = "") -> str:
    """1.02 B, 26.2 M, 5.1 k: three digits with a decimal prefix (k, M, B = 10³, 10⁶, 10⁹)."""
    if number is None or (isinstance(number, float) and math.isnan(number)):
        return "–"
    for factor, prefix in ((1e12, "T"), (1e9, "B" if not unit else "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor:
            return f"{number / factor:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".strip()


def gib(number: float) -> str:
    """Bytes as GiB, MiB or KiB with three digits."""
    for factor, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(number) >= factor:
            return f"{number / factor:.3g} {name}"
    return f"{number:.0f} B"


def _code(text: str) -> str:
    """`x` as code, as in the pages' own text."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def table(rows: list[dict], caption: str = "", first_is_header: bool = True):
    """Rows of {column: value} as HTML. Values are shown as they come: format them before."""
    from IPython.display import HTML

    if not rows:
        return HTML("<p>(no rows)</p>")
    columns = list(rows[0])
    head = "".join(f'<th scope="col">{html.escape(str(c))}</th>' for c in columns)
    body = []
    for row in rows:
        cells = []
        for i, column in enumerate(columns):
            value = row.get(column, "")
            text = value.data if isinstance(value, HTML) else _code(html.escape(str(value)))
            cells.append(f'<th scope="row">{text}</th>' if i == 0 and first_is_header else f"<td>{text}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    heading = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return HTML(f'<div class="pst-scrollable-table-container"><table class="table zerolab">{heading}<thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>')


def summary(report: Report) -> str:
    """The HTML that a report shows of itself: one row a variant."""
    rows = []
    for v in report:
        seen = bool(v.data.get("collectives"))
        row = {"variant": v.name, "status": "predicted" if v.foretold else v.status if v.ok else f"{v.status}: {v.message}"}
        row["all-gathers F + B + step"] = " + ".join(str(v.count("all_gather", p)) for p in trace.PHASES) if seen else "–"
        row["reduce-scatters"] = v.count("reduce_scatter") if seen else "–"
        row["peak resident"] = human(v.peak_resident) if seen and v.data.get("resident") else "–"
        row["step, s"] = f"{v.seconds():.3f}" if v.times() else "–"
        row["÷ first"] = str(report.ratio(v.name)) if v.times() and report[report.base].times() and v.name != report.base else ""
        rows.append(row)
    return table(rows).data + f'<p class="provenance">{html.escape(report.line)}</p>'


def predicted(prediction: dict):
    """A table of what is predicted for each variant: collectives of a steady step, passes, residency."""
    return table([{"variant": name, **_exact(s.steady, s.passes)} for name, s in prediction.items()])


def _exact(step, passes: float) -> dict:
    gathers = " + ".join(f"{step.count(op='all_gather', phase=p):,}" for p in trace.PHASES)
    return {
        "all-gathers F + B + step": gathers,
        "reduce-scatters": f"{step.count(op='reduce_scatter'):,}",
        "gathered ÷ model": f"{passes:.3f}",
        "peak resident": human(step.peak_resident),
    }


def compared(report: Report, prediction: dict):
    """What was measured, and whether every collective of the steady step is the predicted one."""
    rows = []
    for v in report:
        if not v.ok:
            rows.append({"variant": v.name, "measured": f"{v.status}: {v.message}"})
            continue
        gathers = " + ".join(f"{v.count('all_gather', p):,}" for p in trace.PHASES)
        steps = prediction[v.name].steps
        step = steps[min(len(v.data["collectives"]), len(steps)) - 1]
        same = not trace.difference(step.collectives, v.collectives())
        rows.append(
            {
                "variant": v.name,
                "all-gathers F + B + step": gathers,
                "reduce-scatters": f"{v.count('reduce_scatter'):,}",
                "gathered ÷ model": f"{v.passes:.3f}",
                "peak resident": human(v.peak_resident),
                "as predicted": "predicted, not run" if v.foretold else "yes, every one" if same else "NO",
            }
        )
    return table(rows)


def recorded_ratios(name: str, phase: str = "total"):
    """The recorded GPU runs of a lab as HTML: time ratio, peak memory and counts for each variant, a table a machine.

    Says plainly when there is none yet.
    """
    from IPython.display import HTML

    from zerolab.report import recorded

    parts = []
    for report in recorded(name):
        rows = []
        for v in report:
            row = {"variant": v.name}
            if not v.ok:
                # PyTorch's message goes on with the card's state and advice; the first sentence is the finding.
                rows.append(row | {"step, s": f"{v.status}: {v.message.split('. GPU ')[0]}"})
                continue
            row["step, s"] = f"{v.seconds():.3f}" if v.times() else "–"
            timed = v.times() and report[report.base].times() and v.name != report.base
            row["÷ first, 95 % interval"] = str(report.ratio(v.name, phase=phase)) if timed else "1"
            allocated = v.memory.get("allocated") or v.data.get("peak", {}).get("allocated")
            row["peak allocated"] = gib(allocated) if allocated else "–"
            if v.data.get("collectives"):
                row["all-gathers F + B + step"] = " + ".join(f"{v.count('all_gather', p):,}" for p in trace.PHASES)
                row["reduce-scatters"] = f"{v.count('reduce_scatter'):,}"
            rows.append(row)
        parts.append(table(rows).data + f'<p class="provenance">{html.escape(report.line)}</p>')
    return HTML("".join(parts) or "<p><em>Not recorded on GPUs yet.</em></p>")


def recorded_memory(name: str):
    """The recorded GPU runs of a lab as HTML: peak allocated and reserved memory of a step, and what the allocator holds unused."""
    from IPython.display import HTML

    from zerolab.report import recorded

    parts = []
    for report in recorded(name):
        rows = []
        for v in report:
            held = v.memory if "reserved" in v.memory else v.data.get("peak", {})
            if held:
                row = {"variant": v.name, "peak allocated": gib(held["allocated"]), "reserved": gib(held["reserved"])}
                rows.append(row | {"reserved, not allocated": gib(held["reserved"] - held["allocated"])})
        if rows:
            parts.append(table(rows).data + f'<p class="provenance">{html.escape(report.line)}</p>')
    return HTML("".join(parts) or "<p><em>Not recorded on GPUs yet.</em></p>")


def saved(report: Report, loaded: Report | None = None, names=None):
    """What each way to save (zerolab.ranks.saving) returned, wrote and sent, and how much came back in a process of its own."""
    rows = []
    for v in (report[n] for n in (names or report.variants)):
        for way, s in v.data["saves"].items():
            row = {"variant": v.name, "way": way, "returned": str(s.get("returned", "–"))}
            weights = [size for file, size in s["files"].items() if file.endswith((".bin", ".safetensors", ".pt"))]
            row["weights written"] = gib(sum(weights)) if weights else "no file"
            row["all-gathers"], row["broadcasts"] = (s["collectives"].get(op, (0, 0))[0] for op in ("all_gather", "broadcast"))
            row["in the state dict"] = f"{s['tensors']} tensors, {s['elements']:,} elements" if "tensors" in s else "–"
            if loaded:
                back = loaded[v.name].data["loads"].get(way)
                row["loaded elsewhere"] = "–" if back is None else came_back(v, back)
            rows.append(row)
    return table(rows, first_is_header=False)


def came_back(variant, back: dict) -> str:
    """ "56 of 56 tensors, bit for bit": what a load gave, against what was trained."""
    if back.get("failed"):
        return back["failed"]
    trained = variant.data["trained"]
    same = sum(trained.get(name) == print_ for name, print_ in back["prints"].items())
    return f"{same} of {len(back['prints'])} tensors, bit for bit" if back["prints"] else "nothing, and no error"
