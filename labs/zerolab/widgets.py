"""What a lab's last cells use: a form that runs the real engine with the reader's value, and a checker for exercises."""

from __future__ import annotations

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
