"""Every benchmark runs for a moment, without any peer, and leaves what it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
CANDIDATES = """
import os, sys, time
from alternate import Candidate, alternate

def fail():
    raise ValueError("on purpose")

def leave_a_process():
    if (pid := os.fork()) == 0:
        os.setsid()
        time.sleep(1000)
    return {"pid": float(pid)}, lambda: None

outcomes = alternate(
    [
        Candidate("good", lambda: ({"value": 2.0}, lambda: None)),
        Candidate("fails", fail),
        Candidate("hangs", lambda: time.sleep(1000)),
        Candidate("dies", lambda: os._exit(3)),
        Candidate("absent", fail, ("no_such_package.module",)),
        Candidate("leaves a process", leave_a_process),
    ],
    rounds=2,
    limit=1.0,
)
for name, outcome in outcomes.items():
    print(name, outcome.rounds if outcome.error is None else outcome.error, sep=": ")
"""


def run(*words: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(FOLDER)}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=100, env=environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def read(folder: Path, stem: str) -> dict[str, Any]:
    """The JSON of a benchmark, once table and plot have been seen."""
    record: dict[str, Any] = json.loads((folder / f"{stem}.json").read_text())
    table = (folder / f"{stem}.md").read_text()
    for name in record["rows"]:
        assert f"\n| {name} | " in table
    assert record["command"] in table
    assert (folder / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
    assert {"python", "gymtask", "gymnasium", "torch"} <= set(record["versions"])
    assert record["machine"]["cores"] >= 1
    return record


@pytest.mark.parametrize(
    ("script", "stem", "words", "base", "others"),
    [
        (
            "collect.py",
            "collect_cartpole_4",
            "--task cartpole --num-envs 4 --num-steps 16 --seconds 0.05 --only",
            "by hand, SyncVectorEnv",
            ["by hand, AsyncVectorEnv", "gymtask sync", "gymtask sync, actions as by hand"],
        ),
        (
            "stragglers.py",
            "stragglers_4",
            "--num-steps 4 --seconds 0.05 --only",
            "by hand, AsyncVectorEnv",
            ["by hand, ready set", "gymtask process, first_come"],
        ),
        (
            "startup.py",
            "startup_2",
            "--num-workers 2 --only",
            "AsyncVectorEnv, fork",
            ["gymtask process"],
        ),
        (
            "vector_step.py",
            "vector_step",
            "--num-envs 4 --seconds 0.05 --only",
            "AsyncVectorEnv",
            ["SyncVectorEnv", "vector_entry_point"],
        ),
        (
            "replay.py",
            "replay_windows",
            "--table windows --num-rows 3000 --seconds 0.02 --only",
            "index_select per key",
            [
                "torch fancy index per key",
                "numpy take per key",
                "packed record, one copy a window",
                "gymtask in memory",
                "gymtask in memory, made contiguous",
                "gymtask on disk",
            ],
        ),
        (
            "replay.py",
            "replay_following",
            "--table following --num-rows 3000 --seconds 0.02 --only",
            "index_select per key",
            ["gymtask on disk", "gymtask in memory, rows of 8 environments"],
        ),
        (
            "replay.py",
            "replay_single",
            "--table single --num-rows 3000 --seconds 0.02 --only",
            "index_select per key",
            ["packed record, index_select", "gymtask in memory"],
        ),
        (
            "replay.py",
            "replay_prioritized",
            "--table prioritized --num-rows 3000 --seconds 0.02 --only",
            "index_select per key, without priorities",
            ["numpy take per key, sums over all rows", "gymtask in memory"],
        ),
        (
            "replay.py",
            "replay_extend",
            "--table extend --num-rows 3000 --seconds 0.02 --only",
            "numpy slice write per key",
            ["torch slice write per key", "gymtask in memory", "gymtask on disk"],
        ),
        (
            "replay.py",
            "replay_interleaved",
            "--table interleaved --num-rows 3000 --seconds 0.02 --only",
            "numpy slice write per key",
            ["gymtask in memory"],
        ),
        (
            "memory.py",
            "memory",
            "--num-frames 1000 --only",
            "frames alone",
            ["gymtask frame_stack=4"],
        ),
        (
            "update.py",
            "update_fused",
            "--seconds 0.2 --only",
            "by hand",
            ["gymtask.Trainer"],
        ),
    ],
)
def test_a_benchmark_leaves_figures_of_every_candidate(
    tmp_path: Path, script: str, stem: str, words: str, base: str, others: list[str]
) -> None:
    # A comma separates the words of --only, and stands in some names.
    only = ",".join(name.split(", ")[-1] for name in others)
    options = [*words.split(), only, "--rounds", "1", "--out", str(tmp_path)]
    printed = run(str(FOLDER / script), *options)
    record = read(tmp_path, stem)
    assert record["base"] == base
    assert f"| {base} | " in printed
    for name in (base, *others):
        row = record["rows"][name]
        assert row["error"] is None
        assert len(row["rounds"]) == 1
        for figure in row["summary"].values():
            assert 0 < figure["min"] == figure["median"] == figure["max"]
    assert record["rows"][base]["summary"][ratio_of(record)]["median"] == 1


def test_a_buffer_larger_than_memory_is_filled_drawn_from_and_overwritten(tmp_path: Path) -> None:
    words = ["--gigabytes", "0.02", "--seconds", "0.1", "--folder", str(tmp_path)]
    figures = json.loads(run(str(FOLDER / "larger_than_memory.py"), *words))
    assert figures["rows"] == 2000
    assert figures["files, GB"] > 0.014
    assert 0 < figures["peak of RssAnon, GB"] < 2
    assert figures["files / limit"] == pytest.approx(figures["files, GB"] / figures["limit, GB"])
    assert all(value > 0 for name, value in figures.items() if name.endswith("rows/s"))
    assert not list(tmp_path.iterdir())


def ratio_of(record: dict[str, Any]) -> str:
    """The heading of the ratio to the base."""
    heads = record["rows"][record["base"]]["summary"]
    (found,) = [head for head in heads if "ratio to" in head]
    return str(found)


def test_a_peer_that_is_not_installed_is_a_row_that_says_so(tmp_path: Path) -> None:
    words = "--task cartpole --num-envs 2 --num-steps 4 --rounds 1 --seconds 0.05"
    run(str(FOLDER / "collect.py"), *words.split(), "--only", "sb3", "--out", str(tmp_path))
    rows = read(tmp_path, "collect_cartpole_2")["rows"]
    assert list(rows) == ["by hand, SyncVectorEnv", "SB3 DummyVecEnv", "SB3 SubprocVecEnv"]
    for name in ("SB3 DummyVecEnv", "SB3 SubprocVecEnv"):
        assert rows[name]["error"] in (None, "stable_baselines3 is not installed")


def test_a_wrong_batch_of_a_replay_buffer_is_found() -> None:
    code = """
import numpy as np
from stores import BATCH, KEYS, Rows

rows = Rows(3000)
starts = rows.starts(8)[:BATCH]
right = rows.some((starts[:, None] + np.arange(8)).ravel(), KEYS)
end = np.flatnonzero(rows.values["next/done"])[0]
across = (np.r_[starts[:-1], end][:, None] + np.arange(8)).ravel()

def said(batch):
    try:
        rows.check(batch, 8, set(KEYS))
    except ValueError as error:
        return str(error)

print(said(right))
print(said(right | {"action": right["action"][::-1]}))
print(said(rows.some(across, KEYS)))
print(said(rows.some(slice(0, 8 * BATCH), KEYS[1:])))
"""
    assert [line.partition(" [")[0] for line in run("-c", code).splitlines()] == [
        "None",
        "action of a batch is not what the rows hold",
        "a window has rows that do not follow each other",
        "a batch has the keys",
    ]


def test_a_candidate_that_fails_stops_no_other_and_nothing_outlives_its_measurement() -> None:
    lines = dict(line.split(": ", 1) for line in run("-c", CANDIDATES).splitlines())
    assert lines["good"] == "[{'value': 2.0}, {'value': 2.0}]"
    assert lines["fails"] == "ValueError: on purpose"
    assert lines["hangs"] == "no answer in 1 s"
    assert lines["dies"] == "its process ended (3)"
    assert lines["absent"] == "no_such_package is not installed"
    for metrics in json.loads(lines["leaves a process"].replace("'", '"')):
        assert not Path(f"/proc/{int(metrics['pid'])}").exists()


@pytest.fixture
def readmes(tmp_path: Path) -> Path:
    """A folder with copies of both READMEs."""
    (tmp_path / "benchmarks").mkdir()
    for name in ("README.md", "benchmarks/README.md"):
        (tmp_path / name).write_text((FOLDER.parent / name).read_text())
    return tmp_path


def test_tables_are_put_between_the_marks_of_the_readme(readmes: Path) -> None:
    (readmes / "vector_step.md").write_text("### A table\n")
    for _ in range(2):  # the second time it replaces what the first put in
        run(
            str(FOLDER / "everything.py"),
            *("--tables", "--out", str(readmes), "--into", str(readmes)),
        )
    found = (readmes / "benchmarks" / "README.md").read_text()
    assert found.count("### A table") == 1
    before, _, after = (FOLDER / "README.md").read_text().partition("<!-- results: begin -->")
    assert found.startswith(before)
    assert found.endswith(after.partition("<!-- results: end -->")[2])
    # Where nothing was measured, the README goes on saying what it said.
    assert (readmes / "README.md").read_text() == (FOLDER.parent / "README.md").read_text()


def test_the_readme_says_what_the_tables_of_the_benchmarks_say() -> None:
    code = "import json, headline; print(json.dumps([headline.ROWS, headline.WORKS]))"
    names_of, works = json.loads(run("-c", code))
    tables = (FOLDER / "README.md").read_text()
    short = (FOLDER.parent / "README.md").read_text().partition("<!-- speed: begin -->")[2]
    short = short.partition("<!-- speed: end -->")[0]
    lines = [line.strip("| ").split(" | ") for line in short.splitlines() if line[:2] == "| "]
    assert lines[0] == ["candidate", *works.values()]
    assert [line[0] for line in lines[2:]] == list(names_of)
    for label, *cells in lines[2:]:
        for work, cell in zip(works.values(), cells, strict=True):
            table = tables.partition(f"### {work} environments")[2].partition("###")[0]
            rows = [line.split(" | ") for line in table.splitlines()]
            found = [row[2] for row in rows if row[0].removeprefix("| ") in names_of[label]]
            figure = cell.strip("* ")
            assert any(each.startswith(figure) for each in found) == bool(figure), (label, work)


def test_everything_runs_the_commands_that_the_readme_names_and_writes_no_readme() -> None:
    code = """
import os, shlex, subprocess, everything
os.chdir(everything.HERE.parent)
subprocess.run = lambda words, check: print(shlex.join(words[1:]))
everything.insert = None
everything.main([])
"""
    ran = [line.removeprefix(f"{FOLDER.parent}/") for line in run("-c", code).splitlines()]
    text = (FOLDER / "README.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("python benchmarks/")] == [
        f"python {line}" for line in ran
    ]


@pytest.mark.parametrize(
    ("script", "defaults"),
    [
        ("collect.py", {"--rounds": "5", "--seconds": "0.8", "--workers": "2"}),
        ("stragglers.py", {"--num-steps": "[512, 128]", "--seconds": "1.0"}),
        ("startup.py", {"--num-workers": "[8, 32]", "--rounds": "5"}),
        ("vector_step.py", {"--num-envs": "64", "--workers": "2"}),
        ("replay.py", {"--num-rows": "1000000", "--seconds": "0.4"}),
        ("memory.py", {"--num-frames": "100000", "--rounds": "5"}),
        ("update.py", {"--seconds": "2.0", "--rounds": "5"}),
        ("larger_than_memory.py", {"--gigabytes": "30.0", "--seconds": "30.0"}),
        ("everything.py", {"--rounds": "5"}),
    ],
)
def test_help_keeps_the_description_and_shows_defaults(
    script: str, defaults: dict[str, str]
) -> None:
    text = run(str(FOLDER / script), "--help")
    assert f"\n    python benchmarks/{script}" in text
    options = " ".join(text.partition("\noptions:\n")[2].split())
    for name, value in defaults.items():
        own = options.partition(f"{name} {name[2:].replace('-', '_').upper()}")[2]
        assert own.partition(" --")[0].endswith(f"(default: {value})"), name
    assert "default: None" not in text


def test_the_headline_takes_the_fastest_of_a_row_and_leaves_out_what_was_not_measured(
    tmp_path: Path,
) -> None:
    def row(**metrics: float) -> dict[str, Any]:
        return {"rounds": [metrics, metrics], "error": None}

    def write(stem: str, rows: dict[str, Any], **options: str) -> None:
        record = {"rows": rows, "options": options, "machine": {"cores": 3}}
        (tmp_path / f"{stem}.json").write_text(json.dumps(record))

    rates = {
        "by hand, SyncVectorEnv": 1000,
        "by hand, EnvPool, 1 thread": 2000,
        "by hand, EnvPool, 2 threads": 3000,
        "gymtask sync": 1500,
        "gymtask sync, log-probabilities in a hook": 9000,
    }
    write("collect_pong_8", {name: row(steps_per_second=each) for name, each in rates.items()})
    steps = {"AsyncVectorEnv": 10, "SyncVectorEnv": 20, "vector_entry_point": 500}
    steps["gymtask.make_vec, process"] = 45
    vector = {name: row(steps_per_second=each) for name, each in steps.items()}
    write("vector_step", vector, num_envs="7", workers="2")
    shares = {"gymtask process, first_come": 0.85, "gymtask process, equal": 0.7}
    shares |= {"by hand, ready set": 0.8, "by hand, AsyncVectorEnv": 0.15}
    write("stragglers_512", {name: row(share=each) for name, each in shares.items()})
    write("stragglers_128", {name: row(share=each / 2) for name, each in shares.items()})
    lines = run(str(FOLDER / "headline.py"), str(tmp_path))
    text = " ".join(lines.replace("\u00a0", " ").split())
    assert "Measured alternately, 2 rounds, on 3 cores" in text
    assert "| candidate | ALE/Pong-v5, 8 |\n" in lines
    assert "| by hand, `SyncVectorEnv`, steps/s | 1,000 |\n" in lines
    assert "| by hand, EnvPool, best of 1 and 2 threads | **3.00** |\n" in lines
    assert "| by hand, the id's own `VectorEnv` |  |\n" in lines
    assert "| gymtask, sync | 1.50 |\n" in lines
    assert "7 CartPole-v1 in 2 workers: 4.5 times as fast as `AsyncVectorEnv`" in text
    assert "`SyncVectorEnv` is 2.0 times as fast, CartPole-v1's own `VectorEnv`" in text
    assert '85 % of what is possible with `allocation="first_come"`, for 70 % with' in text
    assert "whoever is ready keeps them for 80 %, Gymnasium's `AsyncVectorEnv` for 15 %" in text
    assert "rollouts of 512 steps; of 128 steps: 42 %, 35 %, 40 %, 8 %)." in text


def test_the_summary_compares_with_the_fastest_candidate_of_each_peer(tmp_path: Path) -> None:
    def row(*rates: float | None) -> dict[str, Any]:
        rounds = [None if rate is None else {"steps_per_second": rate} for rate in rates]
        return {"rounds": rounds, "error": None}

    rows = {
        "by hand, SyncVectorEnv": row(10, 20, 10),
        "SB3 DummyVecEnv": row(5, 5, 5),
        "SB3 SubprocVecEnv": row(1, 1, 1),
        "TorchRL SerialEnv": row(1, None, None),
        "gymtask sync": row(20, 30, 20),
        "gymtask process": row(5, 5, 5),
        "gymtask process, whole batches": row(40, 40, 30),
    }
    (tmp_path / "collect_cartpole_8.json").write_text(json.dumps({"rows": rows}))
    lines = run(str(FOLDER / "summary.py"), str(tmp_path)).splitlines()
    assert [[part.strip() for part in line.split("|")[1:3]] for line in lines[2:4]] == [
        ["CartPole-v1, 8: gymtask sync", "2.00 (1.50 to 2.00)"],
        ["CartPole-v1, 8: gymtask process, whole batches", "3.00 (2.00 to 4.00)"],
    ]
    assert "8.00 (6.00 to 8.00) | - | - |" in lines[3]
