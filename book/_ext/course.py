"""What this book asks of Sphinx beyond Jupyter Book. Local, no package of its own.

Labs are read (run, or taken from the cache) first: chapters show what labs have just measured.
A cached run is dropped when the code behind it changed: jupyter-cache looks at a notebook's own cells alone.
Labs offer their executed .ipynb for download. A cell tagged `your-turn` shows its code and where to run it:
a widget without its kernel would be dead.
`{course-runs}`, `{course-machine}` and `{course-recorded}` make the tables of the status page.

How a chapter says a number
---------------------------
A chapter is a MyST notebook whose front matter asks for `mystnb: {execution_mode: inline}`: it runs in every build.
It reads the results file in a hidden cell and names what it will say; `{eval}` takes any expression:

    ```{code-cell} ipython3
    :tags: [remove-cell]
    run = zerolab.load("05")
    slow = run.ratio("1e4", phase="backward").value
    ```
    A bucket that small makes the backward pass {eval}`f"{slow:.1f}"` times as long.

{evalcode} says the same in code font. A name that does not exist fails the build. tests/test_prose.py fails when a number is typed instead.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from datetime import datetime
from pathlib import Path

from docutils import nodes
from myst_nb.core.variables import RetrievalError, format_plain_text
from myst_nb.ext.eval import eval_warning, retrieve_eval_data
from myst_nb.ext.utils import RoleBase
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from zerolab import machine, report

ROOT = Path(__file__).resolve().parents[2]
LOG = logging.getLogger(__name__)


def labs_first(app, env, docnames):
    """Measure, then tell, then account for it."""
    docnames.sort(key=lambda name: (not name.startswith("labs/"), name == "book/status", name))


def ready_for_eval(app, docname, source):
    """Two habits of notebooks that {eval} does not forgive in an inline page.

    A `remove-cell` cell would run only after the {eval} that follow it; a cell with both other tags runs in place.
    After a cell that ends in `;` IPython keeps silent about expressions too; so such a cell gets a last line that says nothing.
    """
    if "execution_mode: inline" in source[0]:
        text = re.sub(r"^(:tags: \[.*?)\bremove-cell\b", r"\1remove-input, remove-output", source[0], flags=re.MULTILINE)
        source[0] = re.sub(
            r"^(```\{code-cell\}(?:(?!^```).)*;)[ \t]*(\n+```)$", r"\1\nNone\2", text, flags=re.MULTILINE | re.DOTALL
        )


class EvalCode(RoleBase):
    """{evalcode}`expression`: like {eval}, set as code."""

    def run(self):
        try:
            said = "".join(output.data["text/plain"] for output in retrieve_eval_data(self.document, self.text))
        except RetrievalError as error:
            return [], [eval_warning(str(error), self.document, self.line)]
        text = format_plain_text(said, "")
        return [nodes.literal(text, text)], []


# --- the cache ---------------------------------------------------------------------------------------------------------


def fingerprint(root: Path = ROOT) -> str:
    """Changes whenever a lab could measure something else, or write it elsewhere: code, pins, devices, world size, folder."""
    digest = hashlib.sha256()
    for path in sorted([*root.glob("labs/zerolab/**/*.py"), root / "requirements.txt"]):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    world = machine.world_size()
    digest.update(f"{machine.tier(world)} {world} {machine.gpus()} {report.results_folder()}".encode())
    return digest.hexdigest()


def drop_stale_cache(app, config):
    """Also when the labs' results are gone: a cached lab would not write them again."""
    cache = Path(config.nb_execution_cache_path or ROOT / "_build/.jupyter_cache")
    stamp = cache / "fingerprint"
    now = fingerprint()
    kept = stamp.read_text() if stamp.exists() else ""
    results = any(report.results_folder().glob("*.json"))
    if cache.exists() and (kept != now or not results):
        LOG.info("the code, the machine or the results changed: every lab runs again")
        shutil.rmtree(cache)
    cache.mkdir(parents=True, exist_ok=True)
    stamp.write_text(now)


# --- labs --------------------------------------------------------------------------------------------------------------


def offer_notebook(app, pagename, templatename, context, doctree):
    """The theme's download menu shows an .ipynb when it finds one under this name; it makes one only beside a launch button."""
    made = Path(app.outdir).parent / "jupyter_execute" / f"{pagename}.ipynb"
    if pagename.startswith("labs/") and made.exists():
        target = Path(app.outdir) / "_sources" / f"{pagename}.ipynb"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(made, target)
        context["ipynb_source"] = f"{pagename}.ipynb"


def your_turn(app, doctree):
    """In place of a `your-turn` cell's widgets: where they live."""
    for cell in list(doctree.findall(nodes.container)):
        if "tag_your-turn" not in cell["classes"]:
            continue
        for output in list(cell.findall(nodes.container)):
            if "cell_output" in output["classes"]:
                output.parent.remove(output)
        text = nodes.paragraph("", "Sliders need a kernel. Open this lab with ")
        text += nodes.literal("", "make lab")
        text += nodes.Text(" and run this cell there.")
        cell.append(nodes.container("", text, classes=["your-turn"]))


# --- the status page ---------------------------------------------------------------------------------------------------


def table(head: list[str], rows: list[list]) -> nodes.Element:
    """A plain table that scrolls inside itself on a narrow screen. Cells are strings or inline nodes."""
    whole = nodes.table(classes=["course-table"])
    group = nodes.tgroup(cols=len(head))
    group += [nodes.colspec(colwidth=1) for _ in head]
    body = nodes.tbody()
    for kind, lines in ((nodes.thead(), [head]), (body, rows)):
        for line in lines:
            row = nodes.row()
            for cell in line:
                content = cell if isinstance(cell, nodes.Node) else nodes.Text(str(cell))
                row += nodes.entry("", nodes.paragraph("", "", content))
            kind += row
        group += kind
    whole += group
    return nodes.container("", whole, classes=["course-scroll"])


def machine_rows() -> list[list[str]]:
    """What this build ran on."""
    gpus = machine.gpus()
    return [
        ["Processor", f"{machine.processor()}, {machine.cores()} cores"],
        ["Memory", f"{machine.memory_gib():.1f} GiB"],
        ["GPUs", ", ".join(f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)) or "none"],
        ["Labs run as", machine.tier_line()],
        *[[name, version] for name, version in machine.versions().items()],
        ["Commit", machine.commit()],
        ["Built", datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")],
    ]


def recorded_rows() -> list[list[str]]:
    """One row for every recorded machine: what ran there, and where that comes from."""
    rows = []
    for name in report.recorded_machines():
        runs = [report.Report.load(path) for path in sorted(report.results_folder(name).glob("[0-9]*.json"))]
        if not runs:
            continue  # rates alone
        where = dict.fromkeys(" · ".join(run.line.split(" · ")[:3]) for run in runs)  # devices, versions, commit
        dates = sorted(run.provenance["date"] for run in runs)
        days = " to ".join(dict.fromkeys(date[:10] for date in (dates[:1] + dates[-1:])))
        rows.append([name, "; ".join(where), days, ", ".join(dict.fromkeys(run.name[:2] for run in runs))])
    return rows


class Machine(SphinxDirective):
    def run(self):
        return [table(["", "This build"], machine_rows())]


class Recorded(SphinxDirective):
    def run(self):
        rows = recorded_rows()
        if not rows:
            return [nodes.paragraph(text="No recorded runs yet: every number in this book is from this build.")]
        return [table(["Machine", "Devices, versions, commit", "Recorded", "Labs"], rows)]


class runs_here(nodes.General, nodes.Element):
    """Becomes the table of run times once every page has been read."""


class Runs(SphinxDirective):
    def run(self):
        return [runs_here()]


class FillRuns(SphinxPostTransform):
    default_priority = 8

    def run(self, **kwargs):
        for here in list(self.document.findall(runs_here)):
            rows = []
            for name, data in sorted(self.env.nb_metadata.items()):
                seen = data.get("exec_data")
                if not seen or name == self.env.docname:
                    continue
                link = nodes.reference("", self.env.titles[name].astext(), internal=True)
                link["refuri"] = self.app.builder.get_relative_uri(self.env.docname, name)
                when = datetime.fromtimestamp(seen["mtime"]).strftime("%Y-%m-%d %H:%M")
                took = "" if seen["runtime"] is None else f"{seen['runtime']:.1f} s"
                rows.append([link, took, when, "ran" if seen["succeeded"] else "failed"])
            empty = nodes.paragraph(text="No page of this build runs code.")
            here.replace_self(table(["Page", "Took", "Ran at", ""], rows) if rows else empty)


def setup(app):
    app.add_config_value("comments_config", {}, "")  # Jupyter Book always sets it; its extension is left out
    app.connect("config-inited", drop_stale_cache, priority=900)
    app.connect("env-before-read-docs", labs_first)
    app.connect("source-read", ready_for_eval)
    app.connect("doctree-read", your_turn)
    app.connect("html-page-context", offer_notebook, priority=400)
    app.add_node(runs_here)
    app.add_role("evalcode", EvalCode())
    app.add_directive("course-machine", Machine)
    app.add_directive("course-recorded", Recorded)
    app.add_directive("course-runs", Runs)
    app.add_post_transform(FillRuns)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
