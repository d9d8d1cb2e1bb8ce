"""The table that the note left empty: one row a parameter, generated from DeepSpeed's source and this build's results."""

from __future__ import annotations

from zerolab import figures, knobs
from zerolab.report import Report, load

# field: (what it controls, raise it when, lower it when, what it costs)
ADVICE = {
    "stage": ("which states are split among ranks", "weights do not fit", "they fit: stage 2 gathers nothing in a micro-step", "gathers in every micro-step"),
    "overlap_comm": ("own streams for gathers and reductions", "leave it on", "a measured reason only", "none to speak of in stage 3"),
    "contiguous_gradients": ("whether gradients are copied into a bucket made beforehand", "leave it on", "the bucket does not fit", "the whole bucket, from the start"),
    "sub_group_size": ("how much of a shard the optimizer updates at once", "the step phase is slow", "memory runs out in the step", "about 12 bytes an element while stepping"),
    "reduce_bucket_size": ("elements that are reduced together", "full fine-tuning with short backward", "LoRA: to the adapter's elements", "2 bytes an element, from the start"),
    "prefetch_bucket_size": ("elements asked for ahead at each module", "gathers wait and memory is free", "the flat buffer does not fit", "a flat buffer of its size"),
    "param_persistence_threshold": ("which small tensors stay gathered", "many micro-steps without prefetch", "prefetch is on: they travel for free", "a gather for each tensor after every step"),
    "max_live_parameters": ("how far prefetch runs ahead", "computation waits for gathers", "memory is short", "2 bytes an element"),
    "max_reuse_distance": ("what stays from forward to backward", "most of the model fits in memory", "memory is short", "2 bytes an element kept"),
    "gather_16bit_weights_on_model_save": ("whether whole weights are gathered on saving", "you need a loadable file", "checkpoints to resume from are enough", "host memory for the model on one rank"),
    "offload_optimizer": ("where master weights and Adam's states live", "optimizer states do not fit", "LoRA: they are small", "gradients and weights cross the bus every step"),
    "offload_param": ("where each rank's shard of the weights lives", "the shard decides whether you fit", "whenever you fit without", "a shard crosses the bus every pass"),
}  # fmt: skip


def _effects() -> dict:
    """field: a sentence with this build's numbers."""

    def run(name) -> Report:
        return load(name)

    def gathers(v):
        return " + ".join(str(v.count("all_gather", p)) for p in ("forward", "backward"))

    def ratio(report, name, base, phase="total"):
        return f"{report.ratio(name, base, phase)} of the {'step' if phase == 'total' else phase}"

    stages, overlap, sub = run("01_stage"), run("02_overlap_comm"), run("04_sub_group_size")
    contiguous, reduce, prefetch = run("03_contiguous_gradients"), run("05_reduce_bucket_size"), run("06_prefetch_bucket_size")
    persist, live, reuse = run("07_param_persistence_threshold"), run("08_max_live_parameters"), run("09_max_reuse_distance")
    host, param = run("11_offload_optimizer"), run("12_offload_param")
    names = list(persist.variants)
    return {
        "stage": f"all-gathers in a micro-step: {gathers(stages['stage 2'])} in stage 2, {gathers(stages['stage 3'])} in stage 3",
        "overlap_comm": f"false: {ratio(overlap, list(overlap.variants)[1], overlap.base)}; the same collectives",
        "contiguous_gradients": f"bucket of {figures.gib(contiguous['on, 5e8 (note, default)'].holdings['gradient_buffer']['bytes'])}; the same {contiguous['on, 5e6'].count('reduce_scatter')} reduce-scatter either way",
        "sub_group_size": f"{sub['0 (axolotl)'].data['sub_groups']} sub-groups instead of {sub['1e9 (note, default)'].data['sub_groups']}: {ratio(sub, '0 (axolotl)', '1e9 (note, default)', 'step')} phase",
        "reduce_bucket_size": f"{reduce['1e4'].count('reduce_scatter')} reduce-scatters instead of {reduce['1e7 (holds all)'].count('reduce_scatter')}: {ratio(reduce, '1e4', '1e7 (holds all)', 'backward')}",
        "prefetch_bucket_size": f"{gathers(prefetch['5e8 (note)'])} gathers instead of {gathers(prefetch['0 (off)'])}",
        "param_persistence_threshold": f"{persist[names[0]].count('all_gather')} gathers with, {persist[names[1]].count('all_gather')} without, one micro-step and prefetch",
        "max_live_parameters": f"0: {gathers(live['0 (axolotl)'])} gathers instead of {gathers(live['1e9 (note, default)'])}; the peak falls to {live['0 (axolotl)'].peak_resident / live['1e9 (note, default)'].peak_resident:.0%}",
        "max_reuse_distance": f"0: {reuse['0 (axolotl)'].passes:.2f} passes instead of {reuse['1e9 (note, default)'].passes:.2f}; none in a 14B",
        "gather_16bit_weights_on_model_save": "false: save_16bit_model writes no file",
        "offload_optimizer": f"master and Adam's {figures.gib(host['on the device'].holdings['master']['bytes'] + host['on the device'].holdings['optimizer']['bytes'])} a rank move to the host",
        "offload_param": f"{param['offloaded'].shard_passes:.0f} shards copied in a micro-step, {param['offloaded, LoRA + checkpointing'].shard_passes:.1f} with LoRA and checkpointing",
    }  # fmt: skip


def rows() -> list[dict]:
    """One row a parameter, in the note's order. Raises FileNotFoundError when a lab has not run."""
    effects = _effects()
    found = []
    for k in knobs.KNOBS:
        controls, more, less, price = ADVICE[k.field]
        default = figures.human(k.default) if isinstance(k.default, int) and not isinstance(k.default, bool) and k.default > 100 else str(k.default)
        row = {"#": k.number, "parameter": k.key, "unit": k.unit, "default": default, "what it controls": controls}
        row |= {"raise, or turn on, when": more, "lower, or turn off, when": less, "price": price, "measured here": effects[k.field]}
        found.append(row)
    return found


def card():
    """The table as one printable figure."""
    import matplotlib.pyplot as plt

    found = rows()
    columns = ["#", "parameter", "default", "what it controls", "raise, or turn on, when", "lower, or turn off, when", "measured here"]
    widths = [0.03, 0.2, 0.06, 0.18, 0.17, 0.17, 0.19]
    figure, axis = plt.subplots(figsize=(16.5, 8.2), layout="constrained")
    axis.axis("off")
    import textwrap

    cells = [[textwrap.fill(str(r[c]), max(4, int(w * 165))) for c, w in zip(columns, widths)] for r in found]
    drawn = axis.table(cellText=cells, colLabels=columns, colWidths=widths, cellLoc="left", loc="center")
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(7.5)
    for (row, _), cell in drawn.get_celld().items():
        lines = 1 if row == 0 else max(text.count("\n") + 1 for text in cells[row - 1])
        cell.set_height(0.024 * lines + 0.018)
        cell.set_edgecolor("#cccccc")
        if row == 0:
            cell.set_text_props(weight="bold")
    return figures.note(figure, load("05_reduce_bucket_size"))
