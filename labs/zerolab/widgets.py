"""What a lab's last cells use: a form that runs the real engine with the reader's value, and a checker for exercises."""

from __future__ import annotations

import html

from zerolab.experiment import Experiment, ZerolabError
from zerolab.ranks import RanksError


def check(reached: bool, text: str):
    """Say whether an exercise's target is reached. text: what the reader's answer came to, and the target."""
    print(("reached: " if reached else "not yet: ") + text)


def your_turn(experiment: Experiment, key: str, values, label: str = "base", show=lambda report: report):
    """A form: choose a value of `key`, press Run, and the real engine runs it against the experiment's first variant.

    values: what the list offers; anything else can be typed. show: what to display of the report. Returns the widget.
    """
    import ipywidgets as w
    from IPython.display import display

    choice = w.Combobox(
        options=[_text(v) for v in values],
        value=_text(values[0]),
        description=key,
        ensure_option=False,
        style={"description_width": "initial"},
        layout={"width": "32em"},
    )
    button = w.Button(description="Run", button_style="primary", tooltip=f"run the engine with this {key}")
    output = w.Output()

    def run(_):
        button.disabled = True
        output.clear_output()
        with output:
            try:
                first = next(iter(experiment.variants))
                mine = {**experiment.variants[first], key: _value(choice.value)}
                report = experiment.replace(variants={first: experiment.variants[first], "yours": mine}).run(save=False)
                display(show(report))
            except (ZerolabError, RanksError) as error:
                print(error)
            finally:
                button.disabled = False

    button.on_click(run)
    return w.VBox([w.HBox([choice, button]), output])


def planner():
    """The planner page as a form in a notebook: the same controls and presets, planned in Python at every change. Returns the widget."""
    import ipywidgets as w

    from zerolab import planner as form
    from zerolab import planning

    names = list(planning.machines())
    values, wide = form.start(names[0]), {"style": {"description_width": "20em"}, "layout": {"width": "36em"}}
    fields, groups = {}, {}
    for control in form.controls(names):
        about = {"description": f"{control.label} ({control.unit})" if control.unit else control.label, **wide}
        if control.kind == "choice":
            field = w.Dropdown(options=control.options, value=values[control.key], **about)
        elif control.kind == "switch":
            field = w.Checkbox(value=values[control.key], indent=False, **about)
        else:
            field = w.Text(value=str(values[control.key]), continuous_update=False, **about)
        fields[control.key] = field
        groups.setdefault(control.group, []).append(field)
    preset = w.Dropdown(options=["your own", *form.presets(values["model"])], description="Preset", **wide)
    answer = w.HTML()
    filling = []

    def replan(_=None):
        if filling:
            return
        try:
            v = form.checked({key: field.value for key, field in fields.items()}, names)
            kind = None if v["checkpointing"] == "none" else v["checkpointing"]
            asked = {key: v[key] for key in ("model", "world", "lora", "micro_batch", "seq", "accumulation", "machine")}
            memory = v["gpu_memory"] * form.GIB
            found = planning.plan(**asked, config=form.ds_config(v), checkpointing=kind, link=v["link"] * 1e9 or None, gpu_memory=memory)
            answer.value = f"<pre>{html.escape(planning.describe(found))}</pre>"
        except (ValueError, ZerolabError, RanksError) as error:
            answer.value = f"<p><b>{html.escape(str(error))}</b></p>"

    def fill(change):
        filling.append(True)
        for key, value in form.presets(fields["model"].value).get(change["new"], {}).items():
            fields[key].value = value if isinstance(value, bool) or fields[key].__class__ is w.Dropdown else str(value)
        filling.clear()
        replan()

    preset.observe(fill, "value")
    for field in fields.values():
        field.observe(replan, "value")
    replan()
    boxes = w.Accordion([w.VBox(found) for found in groups.values()], titles=list(groups), selected_index=0)
    return w.VBox([preset, boxes, answer])


def _text(value) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 1e4:
        return f"{value:.3g}".replace("e+0", "e").replace("e+", "e")
    return str(value)


def _value(text: str):
    """What a reader typed: true, false, a number, JSON; anything else stays text for DeepSpeed to reject."""
    import json

    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except json.JSONDecodeError:
        return text
