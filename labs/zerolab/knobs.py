"""The note's twelve parameters, and what the installed DeepSpeed says of each: default, alias, line.

Everything is read from DeepSpeed's source text with `ast`, never typed here, and nothing is imported: a notebook that asks for
a default does not wait for torch.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

CONFIG = "runtime/zero/config.py"


@dataclass(frozen=True)
class Knob:
    """One parameter of the note.

    number: the note's section, the course's chapter and lab. field: its name inside DeepSpeed. key: what a ds_config's
    `zero_optimization` section calls it. unit: of the value. note: the value that the note gives.
    """

    number: int
    field: str
    unit: str
    note: object

    @property
    def key(self) -> str:
        return fields()[self.field].alias or self.field

    @property
    def default(self):
        """The stage-3 default of the installed DeepSpeed (`overlap_comm` follows the stage: None there, true in stage 3)."""
        return stage3_defaults()[self.key]

    @property
    def line(self) -> str:
        return f"deepspeed/{CONFIG}:{fields()[self.field].line}"

    @property
    def page(self) -> str:
        return f"{self.number:02d}_{self.field}"


KNOBS = tuple(
    Knob(number, field, unit, note)
    for number, (field, unit, note) in enumerate(
        [
            ("stage", "0 to 3", 3),
            ("overlap_comm", "true or false", True),
            ("contiguous_gradients", "true or false", True),
            ("sub_group_size", "elements of one rank's shard", int(1e9)),
            ("reduce_bucket_size", "elements", int(5e8)),
            ("prefetch_bucket_size", "elements", int(5e8)),
            ("param_persistence_threshold", "elements", int(1e5)),
            ("max_live_parameters", "elements", int(1e9)),
            ("max_reuse_distance", "elements", int(1e9)),
            ("gather_16bit_weights_on_model_save", "true or false", False),
            ("offload_optimizer", "section", {"device": "cpu", "pin_memory": True}),
            ("offload_param", "section", None),
        ],
        start=1,
    )
)


OFFLOADS = {"offload_param": "DeepSpeedZeroOffloadParamConfig", "offload_optimizer": "DeepSpeedZeroOffloadOptimizerConfig"}


def knob(name: str) -> Knob:
    """The knob with this field name, ds_config key, or number. Raises KeyError."""
    for k in KNOBS:
        if str(name).lstrip("0") in (k.field, k.key, str(k.number)):
            return k
    raise KeyError(f"{name!r} is none of the note's parameters: {', '.join(k.key for k in KNOBS)}")


@dataclass(frozen=True)
class Field:
    """A field of DeepSpeedZeroConfig as its source declares it. bounds: pydantic's ge, gt, le, lt where given."""

    name: str
    default: object
    alias: str | None
    bounds: dict
    line: int


def deepspeed_version() -> str:
    return metadata.version("deepspeed")


@cache
def source(path: str, package: str = "deepspeed") -> str:
    """The text of a file of the installed DeepSpeed, such as "runtime/zero/stage3.py", or of another package (it is not imported)."""
    file = Path(str(metadata.distribution(package).locate_file(package))) / path
    if not file.exists():
        raise FileNotFoundError(f"{package} {metadata.version(package)} has no file {path}")
    return file.read_text()


def cite(path: str, snippet: str, nth: int = 1, package: str = "deepspeed") -> str:
    """ "deepspeed/PATH:LINE" of the nth line that contains `snippet`: the course's way to point into DeepSpeed (or another package).

    Raises LookupError when the installed package has no such line: the statement must then be read again.
    """
    lines = [i for i, line in enumerate(source(path, package).splitlines(), 1) if snippet in line]
    if len(lines) < nth:
        raise LookupError(f"{package} {metadata.version(package)}: {path} no longer has {snippet!r}; read the source again")
    return f"{package}/{path}:{lines[nth - 1]}"


def _value(node: ast.expr):
    """A default as declared: a literal, pp_int(5e8), or sys.maxsize."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "pp_int":
        node = node.args[0]
        if isinstance(node, ast.Attribute):
            return 2**63 - 1  # sys.maxsize
        return int(ast.literal_eval(node))
    return ast.literal_eval(node)


@cache
def fields(cls: str = "DeepSpeedZeroConfig", path: str = CONFIG) -> dict[str, Field]:
    """Every declared field of a DeepSpeed config class, by name. A deprecated field or one built by a call is left out."""
    body = next(n for n in ast.parse(source(path)).body if isinstance(n, ast.ClassDef) and n.name == cls).body
    found = {}
    for node in body:
        if not isinstance(node, ast.AnnAssign) or node.value is None:
            continue
        default, alias, bounds = node.value, None, {}
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "Field":
            options = {k.arg: k.value for k in node.value.keywords}
            default = node.value.args[0] if node.value.args else options.get("default")
            alias = ast.literal_eval(options["alias"]) if "alias" in options else None
            bounds = {k: ast.literal_eval(options[k]) for k in ("ge", "gt", "le", "lt") if k in options}
            if "json_schema_extra" in options:
                continue
        try:
            found[node.target.id] = Field(node.target.id, _value(default), alias, bounds, node.lineno)
        except (ValueError, AttributeError):
            continue
    return found


def stage3_defaults() -> dict:
    """{ds_config key: default} of a stage-3 `zero_optimization` section, with what the validators fill in."""
    defaults = {f.alias or f.name: f.default for f in fields().values()}
    defaults["stage"] = 3
    defaults["overlap_comm"] = True  # cite(CONFIG, "self.overlap_comm = self.stage == ZeroStageEnum.weights")
    return defaults


def offload_fields(key: str) -> dict[str, Field]:
    """The fields of the section "offload_param" or "offload_optimizer", by name."""
    return fields(OFFLOADS[key], "runtime/zero/offload_config.py")


def offload_defaults() -> dict[str, dict]:
    """{"offload_param": {field: default}, "offload_optimizer": {...}}: what such a section means beyond its device."""
    return {key: {f.name: f.default for f in offload_fields(key).values()} for key in OFFLOADS}


def aliases() -> dict[str, str]:
    """{field: ds_config key} of DeepSpeedZeroConfig where the two differ; DeepSpeed takes both."""
    return {f.name: f.alias for f in fields().values() if f.alias}


@cache
def leaf_classes() -> frozenset[str]:
    """Classes that DeepSpeed treats as leaf modules without being asked."""
    for node in ast.parse(source("runtime/zero/leaf_module_config.py")).body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "DEFAULT_LEAF_MODULE_CLASSES":
            return frozenset(ast.literal_eval(node.value))
    raise LookupError("DeepSpeed's list of leaf module classes has moved; read the source again")


def note_section() -> dict:
    """The note's own `zero_optimization` section (its value for each parameter; offload_param is absent, as it asks)."""
    return {k.key: k.note for k in KNOBS if k.note is not None}
