"""The book's own Sphinx extension: order, freshness, and what it does to a chapter before it is parsed."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def course():
    spec = importlib.util.spec_from_file_location("course", ROOT / "book/_ext/course.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_labs_are_read_first_and_the_status_page_last(course):
    names = ["book/05_x", "book/index", "book/status", "book/zz", "labs/05_x", "labs/12_y"]
    course.labs_first(None, None, names)
    assert names == ["labs/05_x", "labs/12_y", "book/05_x", "book/index", "book/zz", "book/status"]


def test_fingerprint_follows_what_a_lab_could_measure(course, tmp_path, monkeypatch):
    code = tmp_path / "labs/zerolab/ranks/rank.py"
    code.parent.mkdir(parents=True)
    code.write_text("a = 1\n")
    (tmp_path / "requirements.txt").write_text("torch==1\n")
    seen = [course.fingerprint(tmp_path), course.fingerprint(tmp_path)]
    assert seen[0] == seen[1]
    code.write_text("a = 2\n")
    seen.append(course.fingerprint(tmp_path))
    (tmp_path / "requirements.txt").write_text("torch==2\n")
    seen.append(course.fingerprint(tmp_path))
    monkeypatch.setenv("ZEROLAB_WORLD", "2")
    seen.append(course.fingerprint(tmp_path))
    monkeypatch.setenv("ZEROLAB_RESULTS", str(tmp_path))
    seen.append(course.fingerprint(tmp_path))
    assert len(set(seen)) == 5


@pytest.mark.parametrize("change", ["nothing", "code", "results"])
def test_stale_cache_is_dropped(course, tmp_path, monkeypatch, change):
    results, cache = tmp_path / "results", tmp_path / "cache"
    results.mkdir()
    (results / "05.json").write_text("{}")
    monkeypatch.setenv("ZEROLAB_RESULTS", str(results))
    config = type("Config", (), {"nb_execution_cache_path": str(cache)})
    course.drop_stale_cache(None, config)
    (cache / "global.db").write_text("a run")
    if change == "code":
        monkeypatch.setattr(course, "fingerprint", lambda: "other")
    if change == "results":
        (results / "05.json").unlink()
    course.drop_stale_cache(None, config)
    assert (cache / "global.db").exists() == (change == "nothing")


def test_chapters_are_made_ready_for_eval(course):
    head = "---\nmystnb:\n  execution_mode: inline\n---\n"
    cell = "```{code-cell} ipython3\n:tags: [remove-cell]\n\nx = 1\n```\n\ntext;\n\n```{code-cell} ipython3\nplot(x);\n```\n"
    source = [head + cell]
    course.ready_for_eval(None, "book/05_x", source)
    assert ":tags: [remove-input, remove-output]" in source[0] and "remove-cell" not in source[0]
    assert "plot(x);\nNone\n```" in source[0] and "text;\n\n" in source[0]
    lab = [cell]
    course.ready_for_eval(None, "labs/05_x", lab)
    assert lab == [cell]
