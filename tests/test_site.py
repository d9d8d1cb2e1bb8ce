"""The built book (`make book`), opened page by page in a headless Chromium that reaches nothing but it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from browser import SITE, Visit, browser, served

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.site


def documents() -> list[str]:
    """Every page that _toc.yml names, in reading order."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    return [toc["root"], *(chapter["file"] for part in toc["parts"] for chapter in part["chapters"])]


PAGES = [*documents(), "genindex", "search"]
LABS = [page for page in PAGES if page.startswith("labs/")]


@pytest.fixture(scope="module")
def site():
    if not (SITE / "index.html").exists():
        pytest.fail("there is no built book: make book")
    with served() as address:
        yield address


@pytest.fixture(scope="module")
def chromium():
    with browser() as running:
        yield running


def test_every_source_is_in_the_toc():
    """A chapter that nobody can reach was forgotten."""
    sources = {str(p.relative_to(ROOT).with_suffix("")) for folder in ("book", "labs") for p in ROOT.glob(f"{folder}/*.md")}
    assert sources == set(documents())


def test_nothing_old_is_published():
    """Pages that left the table of contents stay in _build until it is thrown away."""
    built = {str(p.relative_to(SITE).with_suffix("")) for p in SITE.rglob("*.html")} - {"index"}
    assert built - {"_static/webpack-macros", "_static/sbt-webpack-macros"} == set(PAGES)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_page_opens_cleanly(chromium, site, page, dark):
    """Nothing foreign, nothing broken, no error; pictures are there and described; the theme is the reader's."""
    with Visit(chromium, site, f"{page}.html", dark=dark) as visit:
        assert not visit.foreign, "the page asks other hosts"
        assert not visit.broken, "the page asks for files that are not there"
        assert not visit.errors
        for picture in visit.page.query_selector_all("article img, article svg[role=img]"):
            seen = picture.evaluate("e => [e.tagName, e.getAttribute('alt') || e.textContent, e.naturalWidth, e.src || '']")
            tag, said, width, src = seen
            assert len((said or "").strip()) >= 5, f"a picture without a description: {src}"
            assert not re.search(r"\.(png|svg|jpe?g)$", said.strip()), f"a file name is no description: {said}"
            assert tag.lower() == "svg" or width > 0 or not picture.is_visible(), f"a picture that does not show: {src}"
        assert not any("{eval" in text for text in visit.page.locator("article").all_inner_texts()), "a role not understood"
        ground = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(int(c) for c in re.findall(r"\d+", ground)[:3])
        assert (brightness < 200) if dark else (brightness > 600), ground


@pytest.mark.parametrize("page", PAGES)
def test_page_fits_a_phone(chromium, site, page):
    """No sideways scrolling at 390 px: wide tables and code scroll inside themselves."""
    with Visit(chromium, site, f"{page}.html", width=390) as visit:
        assert not visit.errors
        width = visit.page.evaluate("document.documentElement.scrollWidth")
        wide = visit.page.evaluate(
            """[...document.querySelectorAll('article *')].filter(e => e.getBoundingClientRect().right > 391)
               .slice(0, 5).map(e => e.tagName + '.' + e.className)"""
        )
        assert width <= 390, wide


# A control is what a mouse can use and is on the page: the keyboard must come to it, and show where it is.
MARK = """() => {
  const controls = [...document.querySelectorAll(
    'a[href], button, input:not([type=hidden]), select, textarea, summary, [role=button], [onclick]')];
  const shown = controls.filter(e => e.checkVisibility({visibilityProperty: true, opacityProperty: false})
    && !e.disabled && e.getClientRects().length && !e.closest('[inert], [aria-hidden=true]')
    && !(e.matches('input[type=checkbox]') && e.closest('.toctree-checkbox')));
  shown.forEach((e, i) => e.dataset.reach = i);
  return shown.length;
}"""
WHERE = """() => {
  const e = document.activeElement;
  if (!e || e === document.body) return [null, true, ''];
  const s = getComputedStyle(e), seen = s.outlineStyle !== 'none' || s.boxShadow !== 'none';
  return [e.dataset.reach ?? null, seen, e.outerHTML.slice(0, 120)];
}"""


@pytest.mark.parametrize("page", PAGES)
def test_keyboard_reaches_every_control(chromium, site, page):
    with Visit(chromium, site, f"{page}.html") as visit:
        count = visit.page.evaluate(MARK)
        assert count > 5
        visit.page.evaluate("document.activeElement && document.activeElement.blur()")
        reached, unseen = set(), []
        for _ in range(count + 40):
            visit.page.keyboard.press("Tab")
            at, seen, what = visit.page.evaluate(WHERE)
            reached.add(at)
            if not seen:
                unseen.append(what)
            if len(reached - {None}) == count:
                break
        missed = [
            visit.page.evaluate(f"document.querySelector('[data-reach=\"{i}\"]').outerHTML.slice(0, 150)")
            for i in sorted(set(map(str, range(count))) - reached, key=int)
        ]
        assert not missed, "controls that Tab does not reach"
        assert not unseen, "focus that does not show"


def test_predict_shows_what_the_command_prints(chromium, site):
    """Whole lines: a cell's output reaches the page in chunks."""
    with Visit(chromium, site, "book/predict.html") as visit:
        command = visit.page.locator("article .cell_input pre", has_text="zerolab plan").first.inner_text()
        shown = visit.page.locator("article .cell_output pre").first.inner_text()
    command = "".join(line for line in command.splitlines(keepends=True) if not line.startswith("%%"))
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.strip() and shown.strip() == ran.stdout.strip()


def test_reader_can_switch_the_theme(chromium, site):
    with Visit(chromium, site, "book/index.html") as visit:
        seen = set()
        for _ in range(3):
            visit.page.click("button.theme-switch-button >> visible=true")
            seen.add(visit.page.evaluate("document.documentElement.dataset.theme"))
        assert seen == {"light", "dark"}


def test_search_finds_a_word(chromium, site):
    """One search bar, and it works without a server's help."""
    with Visit(chromium, site, "search.html?q=reduce-scatter") as visit:
        visit.page.wait_for_selector("ul.search li a", timeout=10_000)
        assert any("glossary" in a.get_attribute("href") for a in visit.page.query_selector_all("ul.search li a"))
        assert not visit.foreign and not visit.errors
    with Visit(chromium, site, "book/index.html") as visit:
        bars = visit.page.query_selector_all(".search-button-field, form.bd-search")
        assert sum(bar.is_visible() for bar in bars) == 1


@pytest.mark.parametrize("lab", LABS)
def test_lab_offers_its_notebook(chromium, site, lab):
    """The download is the executed notebook, and no sliders stand on the page without a kernel."""
    import nbformat

    with Visit(chromium, site, f"{lab}.html") as visit:
        link = visit.page.query_selector("a.btn-download-notebook-button")
        assert link, "no notebook to download"
        target = visit.page.evaluate("e => new URL(e.getAttribute('href'), location.href).href", link)
        notebook = nbformat.reads(visit.page.request.get(target).text(), as_version=4)
        assert any(cell.get("outputs") for cell in notebook.cells)
        assert not visit.page.query_selector(".widget-view, script[type='application/vnd.jupyter.widget-view+json']")


def test_every_link_leads_somewhere(site):
    """linkchecker over the whole site, anchors included; other hosts are not asked."""
    # As root linkchecker would become "nobody", who may not be allowed to read this environment.
    start = "import linkcheck.command.linkchecker as l; l.drop_privileges = lambda: None; l.linkchecker()"
    options = ["--config", str(ROOT / "tests/linkchecker.ini"), "--threads=4"]
    done = subprocess.run(
        [sys.executable, "-c", start, *options, f"{site}/index.html"], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    checked = re.search(r"(\d+) links? in", done.stdout)
    assert checked and int(checked[1]) > 50, done.stdout[-2000:]
