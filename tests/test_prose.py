"""No number that could be measured is typed into a page. It comes through {eval} from a results file, or it is the note's own word.

What prose may hold: small whole numbers (chapters, ranks, stages: up to 16), years, names with digits in them (bf16, ZeRO-3,
Qwen2.5-14B), versions after a product's name, and whatever stands in a box of class `note-says`.
What it may not: a number with a unit or a counted operation, a decimal, a percentage, a ratio, 5e8, 10^9, a larger integer.
Code is not prose, but text that code shows (strings, comments, captions) is held to the rule about units and ratios.
Some numbers are vouched for, and may then be said again, though never as a ratio: the note's own, once they stand in such a
box on the page; and as a count or a size, those in an `assert` of the page (the run checks them) and in a lab those in its code
(inputs that the reader sees).
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("book/*.md"), *ROOT.glob("labs/*.md")])

NUMBER = r"(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)"
SIZE = r"(?:[kKMGT]i?B(?:/s)?|B|[kKMGT]?bytes?|[kKMG]bit)"
UNIT = rf"(?:{SIZE}|ns|[mµu]s|s|sec(?:onds?)?|min(?:utes?)?|h(?:ours?)?|days?|%|percent|times)"
COUNTED = r"(?:messages?|collectives?|all-?gathers?|reduce-?scatters?|all-?reduces?|broadcasts?|passes|tiles?|launches)"
AMOUNT = re.compile(rf"(?<![\w.])({NUMBER})\s?-?{UNIT}(?![\w])")
COUNT = re.compile(rf"(?<![\w.])({NUMBER})\s?-?(?:{COUNTED}|{SIZE})(?![\w])")
RATIO = re.compile(rf"[×x]\s?{NUMBER}|{NUMBER}\s?×|(?<![\w.]){NUMBER}x\b")
POWER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?[eE][+-]?\d+\b")
TOWER = re.compile(r"\d\s?(?:\^|\*\*)\s?\d|\d[⁰¹²³⁴-⁹]")
DECIMAL = re.compile(r"(?<![\w.-])\d+\.\d+(?![\w.]*\.(?:md|py))")
INTEGER = re.compile(r"(?<![\w.,#-])\d+(?:,\d{3})*(?![\w.]*[\w])")

# Names that carry a number, and what the note takes as given (16 GB cards, 239 s a step): taken out before the rules look.
NAMES = re.compile(
    r"Qwen2\.5(?:-[\d.]+B)?|\b14B\b|\bZeRO-\d\b|\b(?:bf|fp|int|FP|BF)\d+\b|\b(?:16|32|64)[- ]bit\b|\b95 % interval|"
    r"\b(?:DeepSpeed|[Tt]orch|PyTorch|[Tt]ransformers|[Pp]eft|Python|Jupyter Book|PCIe|CUDA)(?: [<≥>]=?)? \d+(?:\.\d+)*|"
    r"\b\d+(?:\.\d+)?B(?= (?:model|LoRA|variant))|\b239 s(?:econds)?\b|\b16 GB\b|\b(?:19|20)\d\d\b|#\d+"
)
LARGEST = 16


def value(number: str) -> float:
    return float(number.replace(",", ""))


def values(count: re.Match) -> set[float]:
    """What a count or a size may be in code: 12 GB/s is 12, 12e9 or 12 * 2**30 there."""
    number, prefix = value(count.group(1)), re.match(rf"{NUMBER}\s?-?([kKMGT]?)", count.group()).group(1).upper()
    power = " KMGT".index(prefix) if prefix else 0
    return {number, number * 1000**power, number * 1024.0**power}


class Vouched(NamedTuple):
    """Values that may be said again: as a count or a size, or in any way but as a ratio."""

    counts: frozenset = frozenset()
    quotes: frozenset = frozenset()


def offences(text: str, only_amounts: bool = False, sure: Vouched = Vouched()) -> list[str]:  # noqa: B008
    """The numbers in a piece of prose that could have been measured."""
    text = NAMES.sub(" ", text)
    found = []

    def take(rule, group=None, allowed=frozenset()):
        nonlocal text
        for m in rule.finditer(text):
            if group is None or value(m.group(group)) not in allowed:
                found.append(m.group().strip())
        text = rule.sub(" ", text)

    anyway = sure.counts | sure.quotes
    text = COUNT.sub(lambda m: " " if values(m) & anyway else m.group(), text)
    take(RATIO)
    take(AMOUNT, 1, sure.quotes)
    take(COUNT)
    if not only_amounts:
        take(TOWER)
        take(POWER, 0, anyway)
        take(DECIMAL, 0, anyway)
        take(INTEGER, 0, anyway | set(range(LARGEST + 1)))
    return found


def vouched(source: str, lab: bool) -> Vouched:
    counts = set()
    for cell in re.findall(r"^```\{code-cell\}[^\n]*\n(.*?)^```", source, re.MULTILINE | re.DOTALL):
        try:
            tree = ast.parse(re.sub(r"\A(---\n.*?^---\n|(:[^\n]*\n)+)", "", cell, count=1, flags=re.MULTILINE | re.DOTALL))
        except SyntaxError:
            continue
        for part in [tree] if lab else [n for n in ast.walk(tree) if isinstance(n, ast.Assert)]:
            counts |= {float(n.value) for n in ast.walk(part) if isinstance(n, ast.Constant) and type(n.value) in (int, float)}
    boxes = re.findall(r"^(:{3,}|`{3,})\{admonition\}[^\n]*\n:class:[^\n]*note-says(.*?)^\1", source, re.MULTILINE | re.DOTALL)
    said = re.findall(rf"(?<![\w.])\d+(?:\.\d+)?[eE]\d+|{NUMBER}", " ".join(text for _, text in boxes))
    return Vouched(frozenset(counts), frozenset(map(value, said)))


def without_markup(line: str) -> str:
    """A line of MyST less what is no prose: roles other than {term}, substitutions, link targets, tags, config literals."""
    line = re.sub(r"\{\{.*?\}\}", " ", line)
    line = re.sub(r"\{(?!term\})[\w:-]+\}(`+).*?\1", " ", line)
    line = re.sub(r"`[^`]*[:=][^`]*`", " ", line)  # `key: value`, `NAME=1`: what the reader types
    line = re.sub(r"`[^`]*[/_(][^`]*`", " ", line)  # `labs/05_x.md`, `stage3_max_live_parameters`
    line = re.sub(r"\]\([^)]*\)|\[\w+\]:.*|<https?://[^>]*>|https?://\S+", " ", line)
    line = re.sub(r"<[^>]+>", " ", line)
    return line.replace("`", " ").replace("*", " ")


def prose(source: str):
    """Yields (line number, text, is code's text) of everything that a reader reads and nobody computed."""
    lines = source.splitlines()
    start = 0
    if lines and lines[0] == "---":
        start = lines.index("---", 1) + 1
    fences: list[tuple[str, str]] = []  # (marker, kind), innermost last
    code: list[str] = []
    code_at = 0
    for number, line in enumerate(lines[start:], start + 1):
        text = line.strip()
        mark = re.match(r"(`{3,}|:{3,}|~{3,})\s*(.*)", text)
        if fences and mark and not mark[2] and mark[1].startswith(fences[-1][0]):
            if fences.pop()[1] == "code":
                yield from shown_by_code(code, code_at)
            continue
        kind = fences[-1][1] if fences else "prose"
        if kind in ("code", "literal"):
            code.append(line)
            continue
        if mark and mark[2]:
            kind = "note" if kind == "note" else kind_of(mark[2])
            fences.append((mark[1], kind))
            code, code_at = [], number
            title = re.sub(r"^\{[\w:-]+\}", "", mark[2]) if mark[2].startswith("{") and kind != "code" else ""
            if kind == "prose" and title:
                yield number, without_markup(title), False
            continue
        if mark and not fences or mark and fences[-1][1] == "prose":
            fences.append((mark[1], "prose"))  # a bare fence: pasted output is read like any prose
            continue
        option = re.match(r":([\w-]+):(.*)", text) if fences else None
        if option:
            if option[1] == "class" and "note-says" in option[2]:
                fences[-1] = (fences[-1][0], "note")
            if option[1] in ("alt", "caption") and fences[-1][1] == "prose":
                yield number, option[2], False
            continue
        if kind == "prose":
            yield number, without_markup(line), False


def kind_of(info: str) -> str:
    if info.startswith("{code-cell}"):
        return "code"
    if info.startswith("{"):
        return "literal" if re.match(r"\{(code-block|literalinclude|toctree|bibliography|math|raw)\}", info) else "prose"
    return "prose" if info.split()[0] in ("text", "console", "none") else "literal"


def shown_by_code(lines: list[str], at: int):
    """Strings and comments in a code cell, and captions in its head: text that somebody typed and a reader sees."""
    head, body = [], lines
    if lines and lines[0].strip() == "---":
        end = next(i for i, line in enumerate(lines[1:], 1) if line.strip() == "---")
        head, body = lines[1:end], lines[end + 1 :]
    else:
        while body and body[0].startswith(":"):
            head, body = [*head, body[0][1:]], body[1:]
    if head:
        for text in strings_in(yaml.safe_load("\n".join(head))):
            yield at, text, False
    text = "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in body)
    try:
        tree, tokens = ast.parse(text), list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (SyntaxError, tokenize.TokenError):
        return
    for token in tokens:
        if token.type == tokenize.COMMENT:
            yield at, token.string, True
    formats = {id(c) for n in ast.walk(tree) if isinstance(n, ast.FormattedValue) and n.format_spec for c in n.format_spec.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in formats:
            yield at, node.value, True


def strings_in(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("caption", "alt") and isinstance(inner, str):
                yield without_markup(inner)
            else:
                yield from strings_in(inner)


def check(source: str, lab: bool = False) -> list[str]:
    sure = vouched(source, lab)
    return [f"line {at}: {bad}" for at, text, is_code in prose(source) for bad in offences(text, is_code, sure)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_page_types_no_measured_number(page):
    found = check(page.read_text(), lab=page.parent.name == "labs")
    assert not found, (
        "numbers that could have been measured are typed here; say them with {eval} from a results file, "
        "or put the note's own words into a box of class note-says:\n  " + "\n  ".join(found)
    )


@pytest.mark.parametrize(
    "text",
    [
        "It is 2.8 times as slow.", "A step takes 16.5 s.", "The default is 5e8.", "That is ×1.5.", "It needs 26 GB.",
        "The bucket holds 100 MB.", "There are 338 all-gathers.", "1 all-gather is left.", "A 3x gain.", "10^9 bytes", "10⁹ bytes",
        "It has 14,770,033,664 elements.", "Only 7% survive.", "1.944 passes", "a ratio of 0.81", "lasts 240 seconds",
        "`5e8` elements", "| a | 2.83 |", "# 338 of them", "> quoted 12 s", "- 49 messages", "60-second runs take 60 s",
        "[text 5 GB](x.md)", "**3.5 GB**", ":::{admonition} It took 5 s\nx\n:::", "```\n2.8 times\n```", "```text\n12 s\n```",
        "```{code-cell} ipython3\nprint('2.8 times slower')\n```", "```{code-cell} ipython3\nf'{a} of 26 GB'\n```", "```{code-cell} ipython3\nx = 1  # 2.8 times slower\n```",
        "```{code-cell} ipython3\n---\nmystnb:\n  figure:\n    caption: 12 s each\n---\nx\n```",
        "```{figure} a.svg\n:alt: 12 s\nA caption of 5 s\n```", "````{note}\n```{tip}\n5 s\n```\n````",
    ],
)  # fmt: skip
def test_rule_catches(text):
    assert check(text)


@pytest.mark.parametrize(
    "text",
    [
        "Chapter 5 runs 4 ranks in stage 3.", "16-bit weights in bf16", "Qwen2.5-14B", "the 14B model", "ZeRO-3 and PR #8148",
        "DeepSpeed 0.19.8 and Python 3.12", "since 2021", "{eval}`f'{ratio:.1f}'` times", "at {{ note_cards }}",
        "`reduce_bucket_size: 5e8`", "`ZEROLAB_WORLD=32`", "see {numref}`fig-12345`", "{cite}`chen2016sublinear`",
        ":::{admonition} The note\n:class: note-says\n5e8 = 500 MB ÷ 2\n:::", "```bash\nsleep 30 s\n```", "a 95 % interval",
        "```{code-cell} ipython3\nx = {'reduce_bucket_size': 5e8, 'n': 12345}\n```", "---\nn: 12345\n---\n# Title", "1. one\n2. two",
        "<img width='500'>", "[a](b_12345.md)", "twelve parameters, twice", "`labs/05_reduce_bucket_size.md`", "5 · reduce_bucket_size",
        "```{image} a.svg\n:width: 100%\n```", "3. third", "Exercise 12", "PCIe 3.0", "stage 3 parameters", "the 12 parameters", "stage 3 weights",
    ],
)  # fmt: skip
def test_rule_lets_pass(text):
    assert not check(text)


def test_numbers_that_are_vouched_for():
    lab = "```{code-cell} ipython3\nx = 1e4\ncap = 24\nassert n == [30, 387]\n```\n"
    assert not check(lab + "A bucket of 1e4 elements, or 10,000. There are 387 reduce-scatters in 24 GiB at 10 kB/s.", lab=True)
    assert check(lab + "A bucket of 1e4 elements.")  # a chapter reads results: its inputs are no measurement of its own
    assert not check(lab + "There are 387 reduce-scatters.")  # asserted
    assert check(lab + "There are 388 reduce-scatters.", lab=True)
    assert check(lab + "It took 30 s.", lab=True)  # a time is no input
    assert check(lab + "It is ×30.", lab=True) and check(lab + "It is 30 times as slow.", lab=True)
    note = ":::{admonition} The note says\n:class: note-says\n5e8 is 500 MB, 56 messages, 0.01 s\n:::\n"
    assert not check(note + "Not 56 messages; the note's 0.01 s and 500 MB are not so. 5e8 counts elements.")
    assert check(note + "57 messages") and check(note + "0.02 s") and check(note + "×56")
    assert check("```{code-cell} ipython3\n:mystnb: {image: {alt: 'takes 12 s'}}\n\nx\n```")
    assert not check("```{code-cell} ipython3\nf'{x:.0%} of it, {y:5.1f} s'\n```")


def test_there_are_pages():
    assert {p.stem for p in PAGES} >= {"index", "measure", "glossary"}
