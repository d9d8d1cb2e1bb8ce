"""`zerolab doctor`: each key of a config gets the verdict that leaving it out proves."""

import json

import pytest

from test_cli import NOTE, zerolab
from zerolab import doctor
from zerolab.experiment import ZerolabError
from zerolab.userconfig import parse

CASE = {"lora": 8, "checkpointing": "non-reentrant"}


def levels(zero, sections=(), **case):
    config = {"zero_optimization": zero, "bf16": {"enabled": True}, **dict(sections)}
    return {f.key: f for f in doctor.examine(config, **{**CASE, **case})}


def test_the_notes_config_is_mostly_the_default():
    found = {f.key: f.level for f in doctor.examine(parse(NOTE), **CASE)}
    defaults = ("overlap_comm", "contiguous_gradients", "sub_group_size", "reduce_bucket_size", "stage3_param_persistence_threshold")
    assert {found[key] for key in defaults} == {"default"}
    assert found["stage3_max_live_parameters"] == "default" and found["stage3_prefetch_bucket_size"] == "matters"


def test_inert_and_costly():
    slow = {"stage": 3, "stage3_max_live_parameters": 2e7, "stage3_prefetch_bucket_size": 5e8, "offload_param": {"device": "cpu"}}
    found = levels({**slow, "stage3_gather_16bit_weights_on_model_save": True})
    assert found["stage3_prefetch_bucket_size"].level == "inert"  # under this limit the bucket changes nothing
    assert found["stage3_max_live_parameters"].level == "matters" and found["stage3_max_live_parameters"].chapter == 8
    assert "peak −" in found["offload_param"].says
    saving = found["stage3_gather_16bit_weights_on_model_save"]
    assert saving.level == "inert" and "saved" in saving.says


def test_refused():
    assert "did you mean stage3_prefetch_bucket_size?" in levels({"stage": 3, "stage3_prefetch_buckets_size": 1})["stage3_prefetch_buckets_size"].says
    assert levels({"stage": 3, "reduce_bucket_size": -1})["reduce_bucket_size"].level == "refused"


def test_other_stages_and_watchers():
    found = levels({"stage": 2, "stage3_max_live_parameters": 1e9}, {"comms_logger": {"enabled": False}})
    assert found["stage3_max_live_parameters"].level == "inert" and "stage here is 2" in found["stage3_max_live_parameters"].says
    assert found["comms_logger"].level == "beware" and "comms_logging.py" in found["comms_logger"].says
    with pytest.raises(ZerolabError, match="no zero_optimization"):
        doctor.examine({})


def test_the_command(tmp_path):
    config = tmp_path / "c.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu"}}}))
    done = zerolab("doctor", config, "--model", "tiny")
    assert done.returncode == 0 and "offload_optimizer" in done.stdout and "step ×" in done.stdout
    config.write_text('{"zero_optimization": {"stage": 3, "typo": 1}}')
    assert zerolab("doctor", config, "--model", "tiny").returncode == 1
