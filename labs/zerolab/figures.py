"""The few pictures that the whole course uses. Each takes reports, returns a matplotlib figure, and carries its provenance.

Labels inside figures are short English or symbols. Variants keep one colour throughout a page.
"""

from __future__ import annotations

import html
import math
import re

import matplotlib
import matplotlib.pyplot as plt

from zerolab import trace
from zerolab.report import Report

matplotlib.rcParams.update(
    {
        "figure.dpi": 110,
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "legend.frameon": False,
        "svg.fonttype": "none",
    }
)
# Okabe and Ito's palette: told apart with any colour vision.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999", "#F0E442")
COMPUTE, LINK, COPY = "#0072B2", "#E69F00", "#009E73"
PHASE = {"forward": "#56B4E9", "backward": "#0072B2", "step": "#999999"}
OPS = {"all_gather": "#0072B2", "reduce_scatter": "#E69F00", "all_reduce": "#D55E00", "broadcast": "#999999"}


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


def note(figure, report: Report | list[Report], extra: str = ""):
    """Write the provenance line under a figure."""
    lines = [r.line + (" · emulated wire" if _emulated(r) else "") for r in ([report] if isinstance(report, Report) else report)]
    figure.text(0.01, -0.02, "\n".join(lines + ([extra] if extra else [])), fontsize=6.5, color="#777777", va="top")
    return figure


def _emulated(report: Report) -> bool:
    return any(v.data["variant"].get("wire") for v in report)


def _axes(rows: int, height=0.42, width=7.2, least=1.3, columns=1):
    figure, axes = plt.subplots(1, columns, figsize=(width, max(least, 0.7 + height * rows)), layout="constrained")
    return figure, axes


def ratios(report: Report, base: str | None = None, phase: str = "total", names=None, title: str | None = None):
    """Time of each variant over the base's, a dot with its 95 % interval; a hollow dot where the interval holds 1."""
    base = base or report.base
    names = [n for n in (names or report.variants) if report[n].times()]
    figure, axis = _axes(len(names), height=0.34)
    for row, name in enumerate(names):
        r = report.ratio(name, base, phase) if name != base else None
        if r is None:
            axis.plot(1, row, "|", color="black", markersize=12)
            axis.annotate("base", (1, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
            continue
        colour = COLOURS[0]
        axis.plot([r.low, r.high], [row, row], color=colour, lw=2)
        axis.plot(r.value, row, "o", color=colour, markerfacecolor=colour if r.sure else "white")
        axis.annotate(f"×{r.value:.2f}", (r.high, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
    axis.axvline(1, color="#bbbbbb", lw=1, zorder=0)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    what = {"total": "step"}.get(phase, phase)
    axis.set_xlabel(f"time of a {what} ÷ that of “{base}”, 95 % interval" if phase == "total" else f"{what} time ÷ that of “{base}”, 95 % interval")
    if title:
        axis.set_title(title)
    return note(figure, report)


def phases(report: Report, names=None, title: str | None = None):
    """Median seconds of each variant, split into forward, backward and step."""
    names = [n for n in (names or report.variants) if report[n].times()]
    figure, axis = _axes(len(names), height=0.34)
    left = [0.0] * len(names)
    for phase, colour in PHASE.items():
        widths = [report[n].seconds(phase) for n in names]
        axis.barh(range(len(names)), widths, left=left, color=colour, label=phase, height=0.62)
        left = [a + b for a, b in zip(left, widths)]
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("s per optimizer step, median")
    axis.legend(ncols=3, loc="lower right", bbox_to_anchor=(1, 1), fontsize=8)
    if title:
        axis.set_title(title)
    return note(figure, report)


def collectives(report: Report, names=None, ops=("all_gather", "reduce_scatter"), title: str | None = None):
    """How many collectives a steady step makes, by op and phase; the number stands at each bar's end."""
    names = [n for n in (names or report.variants) if report[n].data.get("collectives")]
    shades = {("all_gather", "forward"): "#56B4E9", ("all_gather", "backward"): "#0072B2", ("all_gather", "step"): "#003f63"}
    figure, axis = _axes(len(names), height=0.36)
    left = [0] * len(names)
    for op in ops:
        for phase in trace.PHASES:
            counts = [report[n].count(op, phase) for n in names]
            if not any(counts):
                continue
            colour = shades.get((op, phase), OPS.get(op, "#999999"))
            axis.barh(range(len(names)), counts, left=left, color=colour, label=f"{op.replace('_', '-')}, {phase}", height=0.62)
            left = [a + b for a, b in zip(left, counts)]
    for row, total in enumerate(left):
        axis.annotate(f"{total:,}", (total, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set_xlabel("collectives in one optimizer step (exact)")
    axis.legend(ncols=3, loc="lower right", bbox_to_anchor=(1, 1), fontsize=8)
    if title:
        axis.set_title(title)
    return note(figure, report)


def timeline(report: Report, names=None, phase: str | None = None, title: str | None = None):
    """What computed and what was on the link, for one profiled step (slower than an untraced one: read shapes, not seconds)."""
    names = [n for n in (names or report.variants) if report[n].data.get("timeline")]
    lanes = {"compute": COMPUTE, "link": LINK, "copy": COPY}
    figure, axis = _axes(len(names), height=0.85, least=1.6)
    ticks, labels = [], []
    longest = max((report[name].data["timeline"]["end"] for name in names), default=0)
    for row, name in enumerate(names):
        data = report[name].data["timeline"]
        marks = [m for m in data["marks"] if m[0] != "end"] + [["end", 0, data["end"]]]
        used = {lane: spans for lane, spans in data["lanes"].items() if spans}
        for i, (lane, spans) in enumerate(used.items()):
            y = row + (i - (len(used) - 1) / 2) * 0.3
            axis.broken_barh([(s, e - s) for s, e in spans], (y - 0.13, 0.26), color=lanes[lane], linewidth=0)
            ticks.append(y)
            labels.append(f"{name}: {lane}" if i == 0 else lane)
        for (what, _, at), following in zip(marks, marks[1:]):
            axis.plot([at, at], [row - 0.42, row + 0.42], color="#888888", lw=0.7)
            if following[2] - at > 0.09 * longest:
                axis.annotate(what, (at, row - 0.44), fontsize=7, color="#666666", va="bottom", xytext=(2, 0), textcoords="offset points")
    axis.set_yticks(ticks, labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel("s since the step began, one profiled step")
    if title:
        axis.set_title(title)
    return note(figure, report)


def resident(report: Report, names=None, scale: int = 1, title: str | None = None):
    """Gathered elements over the events of one steady step. scale multiplies the axis (1024 in the wind tunnel)."""
    names = [n for n in (names or report.variants) if report[n].data.get("resident")]
    figure, axis = plt.subplots(figsize=(7.2, 2.8), layout="constrained")
    for colour, name in zip(COLOURS, names):
        series = report[name].data["resident"]["series"]
        values = [e * scale for _, e in series]
        x = [i / max(1, len(values) - 1) for i in range(len(values))]
        axis.step(x, values, where="post", color=colour, lw=1.2, label=name)
    axis.set_xticks([0, 1], ["forward begins", "step ends"])
    axis.yaxis.set_major_formatter(lambda value, _: human(value))
    axis.set_ylim(bottom=0)
    axis.set_ylabel("gathered elements" + (f" × {scale}" if scale > 1 else ""))
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    if title:
        axis.set_title(title)
    return note(figure, report)


HOLDING_LABELS = {
    "parameters": "weights, own shard",
    "persistent": "weights, persistent",
    "gradients": "gradients, own shard",
    "gradient_buffer": "reduce bucket",
    "master": "fp32 master",
    "master_gradients": "fp32 gradients",
    "optimizer": "Adam m and v",
}


def holdings(report: Report, names=None, title: str | None = None):
    """Bytes that one rank keeps between steps, by purpose; hatched where they live on the host of a GPU tier."""
    names = [n for n in (names or report.variants) if report[n].holdings]
    figure, axis = _axes(len(names), height=0.4)
    left = [0.0] * len(names)
    for colour, (part, label) in zip(COLOURS, HOLDING_LABELS.items()):
        sizes = [report[n].holdings[part]["bytes"] / 2**20 for n in names]
        if not any(sizes):
            continue
        bars = axis.barh(range(len(names)), sizes, left=left, color=colour, label=label, height=0.62)
        for bar, n in zip(bars, names):
            if report.provenance["tier"] == "gpu" and report[n].holdings[part]["device"] == "cpu":
                bar.set_hatch("////")
                bar.set_edgecolor("white")
        left = [a + b for a, b in zip(left, sizes)]
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("MiB per rank between steps")
    axis.legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1, 1))
    if title:
        axis.set_title(title)
    return note(figure, report)


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
        row = {"variant": v.name, "status": v.status if v.ok else f"{v.status}: {v.message}"}
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
                "as predicted": "yes, every one" if same else "NO",
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
                rows.append(row | {"step, s": f"{v.status}: {v.message}"})
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


def host_copies(report: Report, names=None, title: str | None = None):
    """Host-to-device copies of a micro-step in units of the rank's shard, forward and backward."""
    names = [n for n in (names or report.variants) if report[n].host_copies]
    figure, axis = _axes(len(names), height=0.36)
    left = [0.0] * len(names)
    for phase in ("forward", "backward"):
        widths = []
        for n in names:
            v = report[n]
            offloaded = (v.zero.get("offload_param") or {}).get("device", "none") != "none"
            shard = v.holdings["parameters"]["bytes"] * v.data["variant"]["accumulation"]
            widths.append(v.host_copies[phase] / shard if offloaded else 0.0)
        axis.barh(range(len(names)), widths, left=left, color=PHASE[phase], label=phase, height=0.62)
        left = [a + b for a, b in zip(left, widths)]
    for row, total in enumerate(left):
        axis.annotate(f"{total:.2f}", (total, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set_xlabel("copied from the host in a micro-step ÷ the rank's shard (exact)")
    axis.legend(ncols=2, loc="lower right", bbox_to_anchor=(1, 1), fontsize=8)
    if title:
        axis.set_title(title)
    return note(figure, report)


def alive(report: Report, expected: dict | None = None, names=None, title: str | None = None):
    """Bytes of live tensors on a rank for each element of the model: 32-bit, 16-bit, and what the first backward adds.

    expected: {variant: bytes per element after that backward}, drawn as a tick. Needs watch "alive".
    """
    names = [n for n in (names or report.variants) if report[n].data.get("alive")]
    figure, axis = _axes(len(names), height=0.42)
    for row, n in enumerate(names):
        v, left = report[n], 0.0
        elements = v.model["elements"]
        full, rest, then = (v.alive(dtypes="float32") / elements, v.alive() / elements, v.alive(True) / elements)
        parts = (("32-bit, between steps", full, COLOURS[0]), ("16-bit, between steps", rest - full, COLOURS[5]), ("more after a backward", then - rest, COLOURS[1]))
        for label, width, colour in parts:
            axis.barh(row, width, left=left, color=colour, height=0.62, label=label if row == 0 else None)
            left += max(0.0, width)
        axis.annotate(f"{max(rest, then):.1f}", (left, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
        if expected and n in expected:
            axis.plot([expected[n]] * 2, [row - 0.42, row + 0.42], color="black", lw=1.4, label="the paper" if row == 0 else None)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.margins(x=0.08)
    axis.set_xlabel("bytes on a rank for each element of the model")
    axis.legend(ncols=2, loc="lower right", bbox_to_anchor=(1, 1), fontsize=8)
    if title:
        axis.set_title(title)
    return note(figure, report)


def received(reports: dict[str, Report], names=None, title: str | None = None):
    """Bytes that a rank receives in one optimizer step (ring algorithms), in units of the 16-bit model; a bar for each report.

    reports: {label: Report}; a variant that only some of them have gets fewer bars.
    """
    names = names or list(dict.fromkeys(n for report in reports.values() for n in report.variants))
    figure, axis = _axes(len(names), height=0.28 + 0.16 * len(reports))
    thick = 0.78 / len(reports)
    for i, (colour, (label, report)) in enumerate(zip(COLOURS, reports.items())):
        have = [(row, report[n]) for row, n in enumerate(names) if n in report.variants and report[n].data.get("collectives")]
        rows = [row + (i - (len(reports) - 1) / 2) * thick for row, _ in have]
        widths = [v.wire_bytes / (2 * v.model["elements"]) for _, v in have]
        axis.barh(rows, widths, height=thick * 0.92, color=colour, label=label)
        for row, width in zip(rows, widths):
            axis.annotate(f"{width:.2f}", (width, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set_xlabel("received by a rank in one optimizer step ÷ the model in 16 bit (exact)")
    axis.legend(ncols=len(reports), loc="lower right", bbox_to_anchor=(1, 1), fontsize=8)
    if title:
        axis.set_title(title)
    return note(figure, list(reports.values()))


def card_and_host(report: Report, names=None, scale: int = 1, title: str | None = None):
    """Bytes that a rank keeps between steps, by purpose: what is on its card to the left of zero, what is on the host to the right.

    scale multiplies the axis (1024 in the wind tunnel). On a CPU tier both are the same memory: the config decides the side.
    """
    names = [n for n in (names or report.variants) if report[n].holdings]
    figure, axis = _axes(len(names), height=0.46)
    unit, word = (2**30, "GiB") if scale > 1 else (2**20, "MiB")
    ends = {name: [0.0, 0.0] for name in names}
    for colour, (part, label) in zip(COLOURS, HOLDING_LABELS.items()):
        if not any(report[n].holdings[part]["bytes"] for n in names):
            continue
        for row, name in enumerate(names):
            v, side = report[name], int(on_host(report, report[name], part))
            width = v.holdings[part]["bytes"] * scale / unit * (1 if side else -1)
            axis.barh(row, width, left=ends[name][side], color=colour, height=0.62, label=label if row == 0 else None)
            ends[name][side] += width
    for row, name in enumerate(names):
        for side in (0, 1):
            if ends[name][side]:
                at = dict(xytext=(5, 0) if side else (-5, 0), ha="left" if side else "right", textcoords="offset points")
                axis.annotate(f"{abs(ends[name][side]):.3g}", (ends[name][side], row), va="center", fontsize=8, **at)
    axis.axvline(0, color="black", lw=1)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.margins(x=0.14)
    axis.xaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    axis.set_xlabel(f"{word} per rank between steps:   ← on the card   |   on the host →")
    axis.legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1, 1))
    if title:
        axis.set_title(title)
    return note(figure, report)


def on_host(report: Report, variant, part: str) -> bool:
    """True if a part of the holdings is host memory: seen on a GPU tier, by the variant's config on a CPU tier."""
    if report.provenance["tier"] == "gpu":
        return variant.holdings[part]["device"].startswith("cpu")
    offloaded = {key: (variant.zero.get(key) or {}).get("device", "none") != "none" for key in ("offload_optimizer", "offload_param")}
    return offloaded["offload_optimizer" if part in ("gradients", "master", "master_gradients", "optimizer") else "offload_param"] and part not in (
        "persistent",
        "gradient_buffer",
    )


def optimizer_traffic(report: Report, names=None, title: str | None = None):
    """Bytes that an offloaded optimizer moves in an optimizer step for each trainable element of the rank's shard, both ways."""
    names = [n for n in (names or report.variants) if report[n].optimizer_traffic]
    figure, axis = _axes(len(names), height=0.44)
    for i, (way, label) in enumerate((("to_host", "card → host"), ("to_device", "host → card"))):
        rows = [row + (i - 0.5) * 0.38 for row in range(len(names))]
        widths = [sum(report[n].optimizer_traffic[way].values()) / (report[n].holdings["gradients"]["bytes"] / 2) for n in names]
        axis.barh(rows, widths, height=0.35, color=(LINK, COMPUTE)[i], label=label)
        for row, width in zip(rows, widths):
            axis.annotate(f"{width:g}", (width, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.margins(x=0.08)
    axis.set_xlabel("bytes per optimizer step ÷ trainable elements of the shard (exact)")
    axis.legend(ncols=2, loc="lower right", bbox_to_anchor=(1, 1), fontsize=8)
    if title:
        axis.set_title(title)
    return note(figure, report)


def peaks(report: Report, phase: str = "step", names=None, beside: str | None = None, title: str | None = None):
    """Most memory that a phase of a step needs beyond what was there before it, MiB on a rank (watch "memory").

    beside: a part of `holdings` ("gradient_buffer") to set beside it: kept all the time, for the sake of this phase.
    """
    names = [n for n in (names or report.variants) if report[n].memory]
    figure, axis = _axes(len(names), height=0.36)
    left = [0.0] * len(names)
    series = [(f"{HOLDING_LABELS[beside]}, all the time", COLOURS[3], [report[n].holdings[beside]["bytes"] for n in names])] if beside else []
    series.append((f"more during {phase}", PHASE[phase], [report[n].memory[phase] for n in names]))
    for label, colour, sizes in series:
        widths = [s / 2**20 for s in sizes]
        axis.barh(range(len(names)), widths, left=left, color=colour, label=label, height=0.62)
        left = [a + b for a, b in zip(left, widths)]
    for row, total in enumerate(left):
        axis.annotate(f"{total:.3g}", (total, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set_xlabel(f"MiB on a rank in {phase}" + ("" if beside else ", above its start"))
    if beside:
        axis.legend(ncols=2, loc="lower right", bbox_to_anchor=(1, 1), fontsize=8)
    if title:
        axis.set_title(title)
    return note(figure, report)


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


def saving(report: Report, name: str, title: str | None = None):
    """One variant's ways to save, in units of its model in 16 bit: what is written, gathered, broadcast, and the peak on two ranks."""
    v = report[name]
    model = 2 * v.model["elements"]
    ways = [way for way in v.data["saves"] if way != "state_dict"]
    figure, axis = _axes(len(ways), height=0.6)
    kinds = ("written", "gathered", "broadcast", "peak, writing rank", "peak, another rank")
    for i, (colour, kind) in enumerate(zip(COLOURS, kinds)):
        rows, widths = [row + (i - 2) * 0.16 for row in range(len(ways))], []
        for way in ways:
            s = v.data["saves"][way]
            sent = {op: size for op, (_, size) in s["collectives"].items()}
            values = (sum(s["files"].values()), sent.get("all_gather", 0), sent.get("broadcast", 0), s["peak"][0], s["peak"][1])
            widths.append(values[i] / model)
        axis.barh(rows, widths, height=0.15, color=colour, label=kind)
    axis.set_yticks(range(len(ways)), ways)
    axis.invert_yaxis()
    axis.set_xlabel("÷ the model in 16 bit")
    axis.legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1, 1))
    if title:
        axis.set_title(title)
    return note(figure, report)
