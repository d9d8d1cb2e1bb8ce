"""A shallow capture, deepened, is the deep capture; a family's member is the capture of that member: all of it, exactly."""

import dataclasses
import itertools

import pytest
import torch

from zerolab.model import build
from zerolab.predict import family, models
from zerolab.predict.capture import capture, numbered

CHECKPOINTING = (None, "non-reentrant", "reentrant", "reentrant-call")
KINDS = list(itertools.product((0, 8), CHECKPOINTING))


def captured(lora, checkpointing, layers, micro_batch=1, seq=512):
    with torch.device("meta"), numbered():
        module = build("tiny", lora=lora, checkpointing=checkpointing, layers=layers)
    module.to(torch.bfloat16)
    return capture(module, module.batch(micro_batch, seq, "meta", seed=0))


@pytest.mark.parametrize("lora, checkpointing", KINDS)
def test_deepen(lora, checkpointing):
    assert family.deepen(captured(lora, checkpointing, 4), 7) == captured(lora, checkpointing, 7)


@pytest.mark.parametrize("lora, checkpointing", KINDS)
def test_members(lora, checkpointing):
    found = family.Family.from_json(models.family_of("tiny", bool(lora), checkpointing).to_json())
    assert found.layers == 8
    for micro_batch, seq, rank in ((1, 768, 4), (2, 1024, 16), (3, 640, 64)):
        rank = rank if lora else 0
        assert found.trace(micro_batch, seq, rank, layers=5) == captured(rank, checkpointing, 5, micro_batch, seq)


def test_a_family_keeps_to_its_kind():
    full = models.family_of("tiny", False, None)
    with pytest.raises(ValueError, match="with adapters or without"):
        full.trace(lora=8)
    with pytest.raises(ValueError, match="at least 4 layers"):
        full.trace(layers=3)


def test_layers_that_differ_are_refused():
    trace = captured(0, None, 4)
    at = next(i for i, (_, module, *_) in enumerate(trace.forward) if family.layer_of(trace.modules[module].name) == 2)
    odd = dataclasses.replace(trace, forward=trace.forward[:at] + trace.forward[at + 1 :])
    with pytest.raises(ValueError, match="inner layers differ"):
        family.deepen(odd, 8)
