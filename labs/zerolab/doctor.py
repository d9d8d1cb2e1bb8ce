"""`zerolab doctor`: a ds_config read key by key: what DeepSpeed refuses, what does nothing with this model, what costs and what it buys.

Nothing here is a rule of thumb. Each key is left out in turn and the two schedules, peaks and step times are compared.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from zerolab import knobs, planning
from zerolab.experiment import ZerolabError, call
from zerolab.progress import Progress
from zerolab.tables import gib, human

LEVELS = ("refused", "beware", "matters", "inert", "default")  # the gravest first
SAVING = {"stage3_gather_16bit_weights_on_model_save": "; it acts when the model is saved"}


@dataclass(frozen=True)
class Finding:
    """level: one of `LEVELS`. key: of zero_optimization, or a section. says: the finding. chapter: number, 0 if none is about it."""

    level: str
    key: str
    says: str
    chapter: int = 0


def examine(config: dict, **case) -> list[Finding]:
    """All findings about a ds_config, the gravest first. case: words of `planning.plans` (model, world, lora, checkpointing, …).

    Raises ZerolabError where the case itself is wrong.
    """
    zero = dict(config.get("zero_optimization") or {})
    if not zero:
        raise ZerolabError("no zero_optimization section; there is nothing to examine")
    found = [*_unknown(zero), *_watchers(config)]
    stage = zero.get("stage", 0)
    if stage != 3:
        idle = sorted(key for key in zero if key.startswith("stage3_") or key in ("offload_param", "sub_group_size"))
        found += [Finding("inert", key, f"only stage 3 reads it; the stage here is {stage}", _chapter(key)) for key in idle]
        return _sorted(found)
    if any(f.level == "refused" for f in found):
        return _sorted(found)
    job = {**planning.job(config=config, **case), "turns": False}
    bar = Progress(1, "examining: importing torch, leaving out each key in turn")
    try:
        answer = call({"work": "plain", "call": "zerolab.predict.models:without_each", "arguments": {"job": job}, "threads": 1, "limit": 300}, world=1)[0]
    finally:
        bar.close()
    if "refused" in answer:
        return _sorted([*found, *(Finding("refused", key, says, _chapter(key)) for key, says in answer["refused"])])
    defaults = knobs.stage3_defaults()
    found += [_finding(key, zero[key], defaults.get(key), effect) for key, effect in answer["keys"].items()]
    return _sorted(found)


def _unknown(zero: dict):
    known = {name for field in knobs.fields().values() for name in (field.name, field.alias) if name}
    for key in zero:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            yield Finding("refused", key, "unknown to DeepSpeed, which stops" + (f"; did you mean {near[0]}?" if near else ""))


def _watchers(config: dict):
    if "comms_logger" in config:
        on, waits = (
            knobs.cite(file, line)
            for file, line in (
                ("utils/comms_logging.py", "self.enabled = comms_config.comms_logger_enabled"),
                ("comm/comm.py", "# Need to make op blocking for accurate logging"),
            )
        )
        says = f"on by being there, also with `enabled: false` ({on}); then every collective waits for the device ({waits}). Take it out"
        yield Finding("beware", "comms_logger", says)


def _chapter(key: str) -> int:
    return next((knob.number for knob in knobs.KNOBS if knob.key == key), 0)


def _finding(key: str, value, default, effect: dict) -> Finding:
    shown = human(default) if isinstance(default, (int, float)) and not isinstance(default, bool) else "off" if default is None else str(default).lower()
    if value == default:
        return Finding("default", key, f"{shown} is DeepSpeed's default: the line changes nothing", _chapter(key))
    if effect["same"]:
        says = f"in a training step of this model the default, {shown}, causes the same collectives, memory and time"
        return Finding("inert", key, says + SAVING.get(key, ""), _chapter(key))
    parts = [f"against the default, {shown}: step ×{effect['time']:.2f}, peak {'+' if effect['memory'] >= 0 else '−'}{gib(abs(effect['memory']))}"]
    if effect["collectives"][0] != effect["collectives"][1]:
        parts.append(f"{effect['collectives'][0]:,} collectives in place of {effect['collectives'][1]:,}")
    return Finding("matters", key, ", ".join(parts), _chapter(key))


def _sorted(found: list[Finding]) -> list[Finding]:
    return sorted(found, key=lambda f: LEVELS.index(f.level))


def describe(found: list[Finding]) -> str:
    """The findings as text for a terminal."""
    width = max(len(f.key) for f in found)
    return "\n".join(f"{f.level:8} {f.key:{width}}  {f.says}" + (f"  (chapter {f.chapter})" if f.chapter else "") for f in found)
