"""`{course-planner}`: the planner page's form, and the files that it loads: the predictor as JavaScript, and the models' families.

All is plain files beside the page, so that the page also works when it is opened from a folder. Families need torch: they are made in
a process of their own and kept in _build until the code changes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import pyjs
from zerolab import knobs, model, planner, planning

ROOT = Path(__file__).resolve().parents[2]
LABS = ROOT / "labs" / "zerolab"
LOG = logging.getLogger(__name__)

# The library's modules that the page runs, each after those that it imports.
MODULES = (
    "trace predict.moduletrace predict.gathered predict.steps predict.coordinator predict.reduce predict.config predict.time "
    "predict.schedule predict.memory predict.plan predict.family userconfig planner"
).split()
# What they hold for other readers: files, terminals, numpy.
LEFT_OUT = {
    "zerolab.trace.difference",
    "zerolab.predict.time.Machine.load",
    "zerolab.predict.steps.Schedule.describe",
    "zerolab.predict.plan.describe",
    "zerolab.predict.plan._verdict",
    "zerolab.predict.family.build",
    *(f"zerolab.userconfig.{name}" for name in ("read", "parse", "_plain", "experiment", "number")),
}


def sources() -> dict[str, str]:
    """The modules' own text; for the two that read DeepSpeed's source or need torch, what they say here, as data."""
    asked = ("stage3_defaults", "offload_defaults", "aliases", "deepspeed_version", "leaf_classes", "note_section")
    said = "".join(f"def {name}():\n    return {_literal(getattr(knobs, name)())}\n" for name in asked)
    data = {"zerolab.knobs": said, "zerolab.model": f"SIZES = {model.SIZES!r}\n"}
    return data | {f"zerolab.{name}": (LABS / f"{name.replace('.', '/')}.py").read_text() for name in MODULES}


def _literal(value) -> str:
    return f"frozenset({sorted(value)!r})" if isinstance(value, frozenset) else repr(value)


def script() -> str:
    """planner-engine.js: the predictor, as a function whose text also makes the worker."""
    data = json.dumps({"machines": planning.machines()})
    return f"const plannerData = {data};\nconst plannerEngine = {pyjs.bundle(sources(), LEFT_OUT, exports='zerolab.planner')};\n"


def families() -> list[tuple[str, str, bool, str]]:
    """(name, model, adapters?, checkpointing) of every family that a reader can choose."""
    return [
        (planner.family_name(size, lora, kind), size, lora, kind)
        for size in model.SIZES
        for lora in (False, True)
        for kind in planner.CHECKPOINTING
    ]


# --- the form ---


def form() -> str:
    """The page's HTML. Every control has a label; results are announced in one line."""
    known = list(planning.machines())
    start = planner.start(known[0])
    groups: dict[str, list[str]] = {}
    for control in planner.controls(known):
        groups.setdefault(control.group, []).append(_control(control, start[control.key]))
    fieldsets = "".join(f"<fieldset><legend>{escape(group)}</legend>{''.join(found)}</fieldset>" for group, found in groups.items())
    names = "".join(f"<option>{escape(name)}</option>" for name in planner.presets(start["model"]))
    return (
        '<form id="planner" class="planner" autocomplete="off" novalidate>'
        '<p class="planner-preset"><label for="planner-preset">Preset</label>'
        f'<select id="planner-preset"><option value="">your own</option>{names}</select></p>'
        f"{fieldsets}</form>"
        '<p id="planner-status" class="planner-status" role="status" aria-live="polite">Starting.</p>'
        '<div id="planner-result" class="planner-result" hidden></div>'
        "<noscript><p>This page needs JavaScript. <code>zerolab plan</code> says the same in a terminal.</p></noscript>"
    )


def _control(control: planner.Control, value) -> str:
    name = f"planner-{control.key}"
    unit = f' <span class="planner-unit">{escape(control.unit)}</span>' if control.unit else ""
    label = f'<label for="{name}">{escape(control.label)}{unit}</label>'
    if control.kind == "switch":
        return f'<p class="planner-switch"><input type="checkbox" id="{name}" name="{control.key}"{" checked" if value else ""}>{label}</p>'
    if control.kind == "choice":
        options = "".join(f"<option{' selected' if option == value else ''}>{escape(option)}</option>" for option in control.options)
        return f'<p>{label}<select id="{name}" name="{control.key}">{options}</select></p>'
    return f'<p>{label}<input type="text" id="{name}" name="{control.key}" value="{value}" spellcheck="false"></p>'


class Planner(SphinxDirective):
    def run(self):
        self.env.metadata[self.env.docname]["planner"] = True
        return [nodes.raw("", form(), format="html")]


# --- what goes to the site ---


def write_engine(app):
    """Before the pages, since pages name their scripts by what is in them."""
    target = Path(app.outdir) / "_static" / "planner"
    target.mkdir(parents=True, exist_ok=True)
    (target / "engine.js").write_text(script())


def add_scripts(app, pagename, templatename, context, doctree):
    if app.env.metadata.get(pagename, {}).get("planner"):
        for name in ("planner/engine.js", "planner.js"):
            app.add_js_file(name)
        app.add_css_file("planner.css")


def write_families(app, exception):
    """Into the site, from _build/families if they are still those of this code."""
    if exception or app.builder.format != "html" or not any("planner" in found for found in app.env.metadata.values()):
        return
    from course import fingerprint

    kept = ROOT / "_build" / "families" / fingerprint()
    if not kept.exists():
        shutil.rmtree(kept.parent, ignore_errors=True)
        LOG.info("planner: capturing the models, about a minute")
        subprocess.run([sys.executable, __file__, str(kept)], check=True)
    target = Path(app.outdir) / "_static" / "planner"
    for path in kept.glob("*.js"):
        shutil.copy2(path, target)


def setup(app):
    app.add_directive("course-planner", Planner)
    app.connect("builder-inited", write_engine)
    app.connect("html-page-context", add_scripts)
    app.connect("build-finished", write_families)
    return {"parallel_read_safe": False, "parallel_write_safe": True}


def main(folder: Path) -> None:
    """Every family as a script that hands its JSON to the page: a page in a folder may load scripts, not data."""
    from zerolab.predict.models import family_of

    making = folder.with_suffix(".part")
    making.mkdir(parents=True, exist_ok=True)
    for name, size, lora, kind in families():
        text = family_of(size, lora, None if kind == "none" else kind).to_json()
        (making / f"{name}.js").write_text(f"plannerFamily({json.dumps(name)}, {json.dumps(text)});\n")
    making.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
