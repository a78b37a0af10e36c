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
            "stragglers",
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


def test_a_candidate_that_fails_stops_no_other_and_nothing_outlives_its_measurement() -> None:
    lines = dict(line.split(": ", 1) for line in run("-c", CANDIDATES).splitlines())
    assert lines["good"] == "[{'value': 2.0}, {'value': 2.0}]"
    assert lines["fails"] == "ValueError: on purpose"
    assert lines["hangs"] == "no answer in 1 s"
    assert lines["dies"] == "its process ended (3)"
    assert lines["absent"] == "no_such_package is not installed"
    for metrics in json.loads(lines["leaves a process"].replace("'", '"')):
        assert not Path(f"/proc/{int(metrics['pid'])}").exists()


def test_tables_are_put_between_the_marks_of_the_readme(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text((FOLDER / "README.md").read_text())
    (tmp_path / "vector_step.md").write_text("### A table\n")
    for _ in range(2):  # the second time it replaces what the first put in
        run(
            str(FOLDER / "everything.py"),
            *("--tables", "--out", str(tmp_path), "--readme", str(readme)),
        )
    assert readme.read_text().count("### A table") == 1
    before, _, after = (FOLDER / "README.md").read_text().partition("<!-- results: begin -->")
    assert readme.read_text().startswith(before)
    assert readme.read_text().endswith(after.partition("<!-- results: end -->")[2])


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
