"""The command line, as a reader types it, and DeepSpeed's own launcher on two nodes."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from zerolab import Experiment, Report, claims, lab
from zerolab.userconfig import parse, resolve_auto

# The note's own block, comments and all, with a small model to run it on.
NOTE = """{
  "zero_optimization": {
    "stage": 3,
    "overlap_comm": true,
    "contiguous_gradients": true,
    "sub_group_size": 1e9,
    "reduce_bucket_size": 5e8,                      // must be made bigger!
    "stage3_prefetch_bucket_size": 5e8,             // must be made bigger!
    "stage3_param_persistence_threshold": 1e5,
    "stage3_max_live_parameters": 1e9,              // must be made bigger!
    "stage3_max_reuse_distance": 1e9,               // must be made bigger!
    "stage3_gather_16bit_weights_on_model_save": false
    // make sure that there is no offload_param!
  },
  "zerolab": {"model": {"size": "qwen2.5-14b", "scale": 32, "layers": 2, "lora": 1, "checkpointing": "non-reentrant"},
              "seq": 8, "rounds": 2, "watch": []}
}"""


def zerolab(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "zerolab", *map(str, arguments)],
        capture_output=True, text=True, timeout=280, env={**os.environ, "ZEROLAB_LOCK": "off", **environment},
    )  # fmt: skip


def test_the_notes_own_config_drives_a_real_engine(tmp_path):
    config = tmp_path / "note.json"
    config.write_text(NOTE)
    done = zerolab("run", config, ZEROLAB_RESULTS=str(tmp_path / "results"))
    assert done.returncode == 0, done.stderr
    assert "CPU tier: 4 gloo ranks" in done.stdout and "yours" in done.stdout
    report = Report.load(tmp_path / "results" / "note.json")
    assert report["yours"].ok and report["defaults"].ok
    assert report["yours"].zero["reduce_bucket_size"] == 488281  # 5e8 in the wind tunnel
    assert report.ratio("yours").rounds == 2
    same = zerolab("compare", tmp_path / "results" / "note.json", tmp_path / "results" / "note.json")
    assert same.returncode == 0 and "same collectives" in same.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2", "neither JSON nor HJSON"),
        ("[1, 2]", "holds no JSON object"),
        ('{"bf16": {"enabled": true}}', "no zero_optimization section"),
    ],
)
def test_a_file_that_is_no_config(tmp_path, text, words):
    (tmp_path / "c.json").write_text(text)
    done = zerolab("run", tmp_path / "c.json")
    assert done.returncode == 1
    assert words in done.stderr and "Traceback" not in done.stderr


def test_what_cannot_be_run_is_named(tmp_path):
    assert "neither a lab's number nor a file" in zerolab("run", "nothing.json").stderr
    assert "there is no lab 99" in zerolab("run", "99").stderr
    (tmp_path / "x.json").write_text("{}")
    assert "not a result file" in zerolab("compare", tmp_path / "x.json", tmp_path / "x.json").stderr


def test_setup_names_a_missing_compiler(tmp_path):
    path = tmp_path / "bin"
    path.mkdir()
    for tool in ("git",):
        os.symlink(f"/usr/bin/{tool}", path / tool)
    done = zerolab("setup", PATH=str(path))
    assert done.returncode == 1
    assert "C++ compiler: none on PATH" in done.stdout and "apt-get install g++" in done.stdout


def test_ctrl_c_ends_the_command_line_and_all_ranks(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "zerolab", "run", "05"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "ZEROLAB_LOCK": "off", "ZEROLAB_RESULTS": str(tmp_path)}, start_new_session=True,
    )  # fmt: skip
    kernel, deadline = psutil.Process(process.pid), time.monotonic() + 100
    while len(kernel.children(recursive=True)) < 5 and time.monotonic() < deadline:
        time.sleep(0.2)
    everyone = kernel.children(recursive=True)
    assert len(everyone) == 5
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and "what was measured until now is kept" in errors
    _, alive = psutil.wait_procs(everyone, timeout=20)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    assert json.loads(next(tmp_path.glob("05*.json")).read_text())["complete"] is False


def test_auto_is_what_hugging_face_makes_of_it():
    zero = parse('{"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",'
                 ' "sub_group_size": "auto", "stage": 3}')  # fmt: skip
    assert resolve_auto(zero, 5120) == {
        "reduce_bucket_size": 26_214_400,
        "stage3_prefetch_bucket_size": 23_592_960,
        "stage3_param_persistence_threshold": 51_200,
        "stage": 3,
    }


def test_deepspeeds_launcher_on_two_nodes(tmp_path):
    """Two nodes of two ranks each, as `deepspeed --hostfile` starts them on each machine; here both are this machine."""
    experiment = Experiment("nodes", {"a": {"reduce_bucket_size": 1e6}}, model={"size": "tiny", "layers": 1}, rounds=1, steps=1, seq=8)
    job, out = tmp_path / "job.json", tmp_path / "out.jsonl"
    job.write_text(json.dumps(experiment.job("clock", ["a"], then_watch=True)))
    world = base64.urlsafe_b64encode(json.dumps({"one": [0, 1], "two": [0, 1]}).encode()).decode()
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}", f"--node_rank={node}",
             "--master_addr=127.0.0.1", "--master_port=29577", "--module", "zerolab.ranks.rank", str(job), str(out)],
            env={**os.environ, "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    printed = [node.communicate(timeout=250)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], printed
    found = experiment.collect(out)["a"]
    assert found.ok and len(found.times()) == 1 and found.data["world"] == 4
    local = experiment.replace(rounds=0).run(save=False, progress=False)["a"]
    assert [c.key for c in found.collectives()] == [c.key for c in local.collectives()]
    assert not list(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*_29577_*"))


def test_labs_are_files_with_an_experiment():
    for number, path in lab.files().items():
        assert lab.experiments(number), number
        text = path.read_text()
        assert "{code-cell}" in text and "tier_line()" in text
        assert lab.cells(path, "your-turn"), f"lab {number} has no your-turn cell"


def test_every_claim_has_evidence_that_still_stands():
    for entry in claims.load():
        assert claims.evidence(entry), entry["n"]
    numbers = [str(entry["n"]) for entry in claims.load()]
    assert len(numbers) == len(set(numbers))
    assert Path(claims.FILE).exists()
