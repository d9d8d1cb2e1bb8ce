"""Defaults, aliases and lines are what DeepSpeed itself declares."""

import json
import subprocess
import sys

import pytest

from zerolab import knobs

READ = """
import json
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig as C
c = C(stage=3)
print(json.dumps({(f.alias or n): (getattr(c, n) if isinstance(getattr(c, n), (int, bool, type(None))) else None)
                  for n, f in C.model_fields.items()}))
"""


@pytest.fixture(scope="module")
def declared():
    out = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, check=True).stdout
    return json.loads(out.splitlines()[-1])


def test_every_default_is_pydantics(declared):
    read = knobs.stage3_defaults()
    for key, value in read.items():
        assert declared[key] == value, key
    assert {k.key for k in knobs.KNOBS} <= set(read)


def test_a_knob_is_found_by_any_of_its_names():
    five = knobs.KNOBS[4]
    assert knobs.knob("05") is knobs.knob("5") is knobs.knob("reduce_bucket_size") is five
    assert knobs.knob("stage3_max_live_parameters").number == 8
    with pytest.raises(KeyError, match="none of the note's parameters"):
        knobs.knob("nonsense")


def test_lines_point_at_the_declaration():
    for k in knobs.KNOBS:
        path, line = k.line.removeprefix("deepspeed/").rsplit(":", 1)
        assert knobs.source(path).splitlines()[int(line) - 1].strip().startswith(k.field)


def test_a_citation_fails_when_the_source_changed():
    assert knobs.cite("runtime/zero/stage3.py", "def independent_gradient_partition_epilogue").startswith("deepspeed/runtime/zero/stage3.py:")
    with pytest.raises(LookupError, match="read the source again"):
        knobs.cite("runtime/zero/stage3.py", "this line was never there")
    with pytest.raises(FileNotFoundError):
        knobs.cite("runtime/zero/none.py", "x")


def test_the_notes_config_is_almost_the_default():
    """The ledger's first finding: beside stage and offload, one of the note's values differs from DeepSpeed's default."""
    defaults, note = knobs.stage3_defaults(), knobs.note_section()
    differing = [k for k, v in note.items() if k not in ("stage", "offload_optimizer") and v != defaults[k]]
    assert differing == ["stage3_prefetch_bucket_size"]


def test_knobs_import_neither_torch_nor_deepspeed():
    code = "import sys, zerolab.knobs, zerolab.experiment, zerolab.figures, zerolab.claims; print([m for m in ('torch', 'deepspeed') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
