"""The labs as files: each is a MyST notebook whose cell tagged `experiment` defines what `zerolab run NN` runs."""

from __future__ import annotations

import re
from pathlib import Path

from zerolab.experiment import Experiment, ZerolabError

LABS = Path(__file__).resolve().parent.parent
CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(?P<body>.*?)^```\s*$", re.MULTILINE | re.DOTALL)


def files() -> dict[str, Path]:
    """{"05": path of labs/05_….md, …} in order."""
    return {p.name[:2]: p for p in sorted(LABS.glob("[0-9][0-9]_*.md"))}


def cells(path: Path, tag: str) -> list[str]:
    """Source of the code cells that carry a tag."""
    found = []
    for match in CELL.finditer(path.read_text()):
        lines = match["body"].splitlines()
        tags = next((line for line in lines if line.startswith(":tags:")), "")
        if tag in re.findall(r"[\w-]+", tags.removeprefix(":tags:")):
            found.append("\n".join(line for line in lines if not re.match(r":[\w-]+:", line)))
    return found


def names(number: str, *tags: str) -> dict:
    """What the cells of a lab that carry these tags define, run here one after the other. Raises ZerolabError when there is no such lab."""
    number = f"{int(number):02d}" if number.isdigit() else number
    if number not in files():
        raise ZerolabError(f"there is no lab {number}; there are {', '.join(files())}")
    namespace: dict = {}
    for tag in tags:
        for source in cells(files()[number], tag):
            exec(compile(source, str(files()[number]), "exec"), namespace)
    return namespace


def experiments(number: str) -> list[Experiment]:
    """The experiments of a lab, as its notebook defines them. Raises ZerolabError when there is no such lab, or it has none."""
    namespace = names(number, "experiment")
    found = [value for value in namespace.values() if isinstance(value, Experiment)]
    if not found:
        raise ZerolabError(f"lab {number} has no cell tagged `experiment`")
    return found
