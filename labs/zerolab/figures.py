"""The few pictures that the whole course uses. Each takes reports, returns a matplotlib figure, and carries its provenance.

Labels inside figures are short English or symbols. Variants keep one colour throughout a page.
"""

from __future__ import annotations

import matplotlib
import matplotlib.pyplot as plt

from zerolab import trace
from zerolab.report import Report
from zerolab.tables import compared, gib, human, predicted, recorded_memory, recorded_ratios, saved, summary, table

# A lab says figures.table(...) as it says figures.ratios(...).
__all__ = ["compared", "gib", "human", "predicted", "recorded_memory", "recorded_ratios", "saved", "summary", "table"]

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


def _chosen(report: Report, names, part: str) -> list[str]:
    """The variants to draw: those asked for, or all, that have this part of the data."""
    return [n for n in (names or report.variants) if report[n].data.get(part)]


def _labels(report: Report, names) -> list[str]:
    return [f"{n} (predicted)" if report[n].foretold else n for n in names]


def _bars(axis, rows, widths, ends: str = "", **look):
    """Horizontal bars; ends: a format for the number at each end."""
    bars = axis.barh(rows, widths, **look)
    _ends(axis, rows, widths, ends)
    return bars


def _ends(axis, rows, widths, ends: str):
    for row, width in zip(rows, widths) if ends else ():
        axis.annotate(format(width, ends), (width, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)


def _stacked(axis, parts, ends: str = ""):
    """Stacked bars, a row for each variant. parts: (label, colour, widths); returns the containers by label. Parts of zeros are left out."""
    left, found = [], {}
    for label, colour, widths in parts:
        left = left or [0.0] * len(widths)
        if any(widths):
            found[label] = axis.barh(range(len(widths)), widths, left=left, color=colour, label=label, height=0.62)
            left = [a + b for a, b in zip(left, widths)]
    _ends(axis, range(len(left)), left, ends)
    return found


def _rows(axis, names, xlabel: str, title: str | None, margin: float | None = 0.1, legend: int | None = None):
    """Variants as rows, the first on top. legend: columns of a legend above the axes, 0 beside them, None without."""
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    if margin:
        axis.margins(x=margin)
    axis.set_xlabel(xlabel)
    if legend:
        axis.legend(ncols=legend, loc="lower right", bbox_to_anchor=(1, 1), fontsize=8)
    elif legend == 0:
        axis.legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1, 1))
    if title:
        axis.set_title(title)


def ratios(report: Report, base: str | None = None, phase: str = "total", names=None, title: str | None = None):
    """Time of each variant over the base's, a dot with its 95 % interval; a hollow dot where the interval holds 1."""
    base = base or report.base
    names = _chosen(report, names, "times")
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
    what = "time of a step" if phase == "total" else f"{phase} time"
    _rows(axis, names, f"{what} ÷ that of “{base}”, 95 % interval", title, margin=0.15)
    return note(figure, report)


def phases(report: Report, names=None, title: str | None = None):
    """Median seconds of each variant, split into forward, backward and step."""
    names = _chosen(report, names, "times")
    figure, axis = _axes(len(names), height=0.34)
    _stacked(axis, [(phase, colour, [report[n].seconds(phase) for n in names]) for phase, colour in PHASE.items()])
    _rows(axis, names, "s per optimizer step, median", title, margin=None, legend=3)
    return note(figure, report)


def collectives(report: Report, names=None, ops=("all_gather", "reduce_scatter"), title: str | None = None):
    """How many collectives a steady step makes, by op and phase; the number stands at each bar's end."""
    names = _chosen(report, names, "collectives")
    shades = {("all_gather", "forward"): "#56B4E9", ("all_gather", "backward"): "#0072B2", ("all_gather", "step"): "#003f63"}
    figure, axis = _axes(len(names), height=0.36)
    parts = [
        (f"{op.replace('_', '-')}, {phase}", shades.get((op, phase), OPS.get(op, "#999999")), [report[n].count(op, phase) for n in names])
        for op in ops
        for phase in trace.PHASES
    ]
    _stacked(axis, parts, ends=",.0f")
    _rows(axis, _labels(report, names), "collectives in one optimizer step (exact)", title, legend=3)
    return note(figure, report)


def timeline(report: Report, names=None, phase: str | None = None, title: str | None = None):
    """What computed and what was on the link, for one profiled step (slower than an untraced one: read shapes, not seconds)."""
    names = _chosen(report, names, "timeline")
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
    names = _chosen(report, names, "resident")
    figure, axis = plt.subplots(figsize=(7.2, 2.8), layout="constrained")
    for colour, name in zip(COLOURS, names):
        series = report[name].data["resident"]["series"]
        values = [e * scale for _, e in series]
        x = [i / max(1, len(values) - 1) for i in range(len(values))]
        axis.step(x, values, where="post", color=colour, lw=1.2, label=_labels(report, [name])[0])
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
    names = _chosen(report, names, "holdings")
    figure, axis = _axes(len(names), height=0.4)
    parts = [
        (label, colour, [report[n].holdings[part]["bytes"] / 2**20 for n in names])
        for colour, (part, label) in zip(COLOURS, HOLDING_LABELS.items())
    ]
    drawn = _stacked(axis, parts)
    for part, label in HOLDING_LABELS.items():
        for bar, n in zip(drawn.get(label, ()), names):
            if report.provenance["tier"] == "gpu" and report[n].holdings[part]["device"] == "cpu":
                bar.set_hatch("////")
                bar.set_edgecolor("white")
    _rows(axis, names, "MiB per rank between steps", title, margin=None, legend=0)
    return note(figure, report)


def host_copies(report: Report, names=None, title: str | None = None):
    """Host-to-device copies of a micro-step in units of the rank's shard, forward and backward."""
    names = _chosen(report, names, "host_copies")
    figure, axis = _axes(len(names), height=0.36)

    def copied(variant, phase):
        offloaded = (variant.zero.get("offload_param") or {}).get("device", "none") != "none"
        shard = variant.holdings["parameters"]["bytes"] * variant.data["variant"]["accumulation"]
        return variant.host_copies[phase] / shard if offloaded else 0.0

    _stacked(axis, [(phase, PHASE[phase], [copied(report[n], phase) for n in names]) for phase in ("forward", "backward")], ends=".2f")
    _rows(axis, names, "copied from the host in a micro-step ÷ the rank's shard (exact)", title, legend=2)
    return note(figure, report)


def alive(report: Report, expected: dict | None = None, names=None, title: str | None = None):
    """Bytes of live tensors on a rank for each element of the model: 32-bit, 16-bit, and what the first backward adds.

    expected: {variant: bytes per element after that backward}, drawn as a tick. Needs watch "alive".
    """
    names = _chosen(report, names, "alive")
    figure, axis = _axes(len(names), height=0.42)
    full, rest, then = (
        [report[n].alive(after, dtypes) / report[n].model["elements"] for n in names]
        for after, dtypes in ((False, "float32"), (False, ""), (True, ""))
    )
    parts = [
        ("32-bit, between steps", COLOURS[0], full),
        ("16-bit, between steps", COLOURS[5], [r - f for r, f in zip(rest, full)]),
        ("more after a backward", COLOURS[1], [max(0.0, t - r) for t, r in zip(then, rest)]),
    ]
    _stacked(axis, parts, ends=".1f")
    for row, n in enumerate(names):
        if expected and n in expected:
            axis.plot([expected[n]] * 2, [row - 0.42, row + 0.42], color="black", lw=1.4, label="the paper" if row == 0 else None)
    _rows(axis, names, "bytes on a rank for each element of the model", title, margin=0.08, legend=2)
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
        _bars(axis, rows, widths, ends=".2f", height=thick * 0.92, color=colour, label=label)
    _rows(axis, names, "received by a rank in one optimizer step ÷ the model in 16 bit (exact)", title, legend=len(reports))
    return note(figure, list(reports.values()))


def card_and_host(report: Report, names=None, scale: int = 1, title: str | None = None):
    """Bytes that a rank keeps between steps, by purpose: what is on its card to the left of zero, what is on the host to the right.

    scale multiplies the axis (1024 in the wind tunnel). On a CPU tier both are the same memory: the config decides the side.
    """
    names = _chosen(report, names, "holdings")
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
                size = abs(ends[name][side])
                axis.annotate(f"{size:,.0f}" if size >= 100 else f"{size:.3g}", (ends[name][side], row), va="center", fontsize=8, **at)
    axis.axvline(0, color="black", lw=1)
    axis.xaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    _rows(axis, names, f"{word} per rank between steps:   ← on the card   |   on the host →", title, margin=0.14, legend=0)
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
    names = _chosen(report, names, "optimizer_traffic")
    figure, axis = _axes(len(names), height=0.44)
    for i, (way, label) in enumerate((("to_host", "card → host"), ("to_device", "host → card"))):
        rows = [row + (i - 0.5) * 0.38 for row in range(len(names))]
        widths = [sum(report[n].optimizer_traffic[way].values()) / (report[n].holdings["gradients"]["bytes"] / 2) for n in names]
        _bars(axis, rows, widths, ends="g", height=0.35, color=(LINK, COMPUTE)[i], label=label)
    _rows(axis, names, "bytes per optimizer step ÷ trainable elements of the shard (exact)", title, margin=0.08, legend=2)
    return note(figure, report)


def peaks(report: Report, phase: str = "step", names=None, beside: str | None = None, title: str | None = None):
    """Most memory that a phase of a step needs beyond what was there before it, MiB on a rank (watch "memory").

    beside: a part of `holdings` ("gradient_buffer") to set beside it: kept all the time, for the sake of this phase.
    """
    names = _chosen(report, names, "memory")
    figure, axis = _axes(len(names), height=0.36)
    kept = [(f"{HOLDING_LABELS[beside]}, all the time", COLOURS[3], [report[n].holdings[beside]["bytes"] / 2**20 for n in names])] if beside else []
    more = (f"more during {phase}", PHASE[phase], [report[n].memory[phase] / 2**20 for n in names])
    _stacked(axis, [*kept, more], ends=".3g")
    xlabel = f"MiB on a rank in {phase}" + ("" if beside else ", above its start")
    _rows(axis, names, xlabel, title, legend=2 if beside else None)
    return note(figure, report)


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
    _rows(axis, ways, "÷ the model in 16 bit", title, margin=None, legend=0)
    return note(figure, report)


def foretold(rows: list[dict], series: dict[str, str], unit: str, scale: float = 1.0, machines: list[Report] = ()):
    """Predicted against measured, a dot for each recorded variant, on the line where both are equal.

    rows: {"measured", and the keys of `series`}; series: {key: label}; scale: what one unit is in the rows' own. Both axes are logarithmic.
    """
    figure, axis = plt.subplots(figsize=(5.2, 3.9), layout="constrained")
    values = [row[key] / scale for row in rows for key in ("measured", *series)]
    ends = [0.8 * min(values), 1.25 * max(values)]
    axis.plot(ends, ends, color="#bbbbbb", lw=1, zorder=0)
    for colour, marker, (key, label) in zip(COLOURS, "o^s", series.items()):
        points = [[row[k] / scale for row in rows] for k in ("measured", key)]
        axis.plot(*points, marker, color=colour, label=label, markersize=5, alpha=0.75, markeredgewidth=0)
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel=f"measured, {unit}", ylabel=f"predicted, {unit}")
    for line in (axis.xaxis, axis.yaxis):
        line.set_major_formatter(lambda value, _: f"{value:g}")
        line.set_minor_formatter(lambda value, _: f"{value:g}" if str(f"{value:e}")[0] in "25" else "")
    axis.legend(fontsize=8, loc="upper left")
    return note(figure, list(machines))


def waterfall(plans: dict[str, dict[str, dict]], note_below: str, title: str | None = None):
    """Foretold seconds of a step as changes add up, a column of bars for each kind of training, with the two bounds as a line.

    plans: {kind: {change: plan}}, see `planning.plans`. note_below: whose rates, for the line under the figure.
    """
    figure, axes = _axes(max(len(steps) for steps in plans.values()), height=0.36, columns=len(plans))
    for i, (axis, (kind, steps)) in enumerate(zip(axes if len(plans) > 1 else [axes], plans.items())):
        seconds = [plan["seconds"] for plan in steps.values()]
        _bars(axis, range(len(steps)), [s["expected"] for s in seconds], ends=".0f", height=0.62, color=COLOURS[0])
        for row, s in enumerate(seconds):
            axis.plot([s["lower"], s["upper"]], [row + 0.38] * 2, color="#777777", lw=1)
        _rows(axis, list(steps) if i == 0 else [""] * len(steps), "s a step, predicted", kind, margin=0.12)
        axis.set_xlim(left=0)
    figure.suptitle(title)
    figure.text(0.01, -0.02, note_below, fontsize=6.5, color="#777777", va="top")
    return figure


def lanes(plans: dict[str, dict], note_below: str):
    """Predicted timelines of one step: what each lane of a machine does when, a group of lanes for each plan (made with `keep`).

    plans: {label: plan}, see `planning.plans`. note_below: whose rates, for the line under the figure.
    """
    colours = {"host": OPS["broadcast"], "compute": COMPUTE, "link": LINK, "copies": COPY}
    figure, axis = _axes(len(plans), height=0.95, least=1.8)
    ticks, labels = [], []
    for row, (label, plan) in enumerate(plans.items()):
        used = {lane: spans for lane, spans in plan["lanes"].items() if spans}
        for i, (lane, spans) in enumerate(used.items()):
            y = row + (i - (len(used) - 1) / 2) * 0.24
            axis.broken_barh([(a, b - a) for a, b in spans], (y - 0.1, 0.2), color=colours[lane], linewidth=0)
            ticks.append(y)
            labels.append(f"{label}: {lane}" if i == 0 else lane)
    axis.set_yticks(ticks, labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel("s since the step began, predicted")
    figure.text(0.01, -0.02, note_below, fontsize=6.5, color="#777777", va="top")
    return figure
