"""bench/gpu_session.sh: a dry run, and, with made-up parts, what it records, how it continues, and what it returns."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import session
from bench.harness.targets import Verdict
from bench.session_parts import (
    CHECKED,
    CHECKED_ON_RANKS,
    FIRST,
    OUTCOMES,
    PROBE,
    PYTEST,
    RESULT,
    SANITIZED,
    TIMED,
    WORKERS,
    Part,
    parts,
)

ROOT = Path(__file__).parents[2]
GPU = {"gpus": 1, "architecture": "9.0a", "versions": {"pytest": "9.0.1"}}


def bash(name: str, script: str, **more: Any) -> Part:
    """Return a part that runs a script. $1 is the file of outcomes (for the part "tests" only), $2 the result file."""
    command = ["bash", "-c", script, "bash", OUTCOMES if name == "tests" else "", RESULT]
    return Part(name, command, ["echo", "dry"], **more)


class Sessions:
    """Runs sessions one after another in one folder, with made-up parts, as on a machine with one GPU."""

    def __init__(self, patch: pytest.MonkeyPatch, out: Path, capture: pytest.CaptureFixture[str]) -> None:
        self._patch, self.out, self._capture = patch, out, capture
        patch.setattr(session, "machine", lambda python: GPU)
        patch.setattr(session, "_LEAST", 0.05)

    def run(self, parts: list[Part], *arguments: str) -> tuple[int, dict[str, Any], list[str]]:
        """Return the exit code, the recorded state of each part, and the lines of the table."""
        self._patch.setattr(session, "parts", lambda python, machine: parts)
        code = session.main(["--out", str(self.out), *arguments])
        printed = self._capture.readouterr().out
        return code, self.state()["parts"], printed.rpartition("\n\n")[2].splitlines()

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "session.json").read_text())
        return found


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Sessions:
    return Sessions(monkeypatch, tmp_path / "out", capsys)


@pytest.mark.slow
def test_a_dry_run_runs_gpu_tests_on_cpu_ranks(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", ROOT / "bench" / "gpu_session.sh", "--dry-run", "--out", str(tmp_path), "build", "tests"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
    )
    log = (tmp_path / "session.log").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log
    found = json.loads((tmp_path / "session.json").read_text())["parts"]
    assert found["build"]["last"] == "nothing is compiled in a dry run"
    name = "test_zeros_and_ones_are_exact_on_two_ranks[('sequential', None, None)-PlainGather]"
    assert found["tests"]["tests"] == {f"tests/gpu/test_values.py::{name}": "passed"}
    assert {path.name for path in tmp_path.iterdir()} == {"session.json", "session.log"}


def test_every_part_has_a_line_and_its_result_is_kept(sessions: Sessions) -> None:
    code, found, table = sessions.run(
        [
            bash("build", "echo built for $ARCH", environment={"ARCH": "9.0a"}),
            bash("broken", "echo 1 is WRONG; exit 3"),
            bash("rows", "echo '{\"rows\": [1, 2]}' > $2; echo measured"),
            bash("two", "echo never", needs="needs two GPUs"),
        ]
    )
    assert code == 1
    assert [line.split(maxsplit=4) for line in table] == [
        ["build", "ok", table[0].split()[2], "s", "built for 9.0a"],
        ["broken", "failed", table[1].split()[2], "s", "1 is WRONG"],
        ["rows", "ok", table[2].split()[2], "s", "measured"],
        ["two", "skipped", "0.0", "s", "needs two GPUs"],
    ]
    assert found["rows"]["result"] == {"rows": [1, 2]}
    assert found["broken"]["exit"] == 3
    assert {path.name for path in sessions.out.iterdir()} == {"session.json", "session.log"}
    assert "1 is WRONG" in (sessions.out / "session.log").read_text()


def test_what_has_ended_well_is_not_run_again_unless_it_is_asked_for(sessions: Sessions, tmp_path: Path) -> None:
    note = tmp_path / "note"
    once = [bash("one", f"echo one >> {note}"), bash("two", f"echo two >> {note}; exit 1")]
    for arguments in ([], [], ["--again", "one"]):
        sessions.run(once, *arguments)
    assert note.read_text().split() == ["one", "two", "two", "one"]


def test_a_part_that_is_cut_off_reports_and_goes_on(sessions: Sessions) -> None:
    hang = """
        if grep -q first $1; then echo passed second >> $1; echo all is well; exit 0; fi
        trap 'echo interrupted; exit 2' INT
        echo passed first >> $1; echo begun second >> $1; for i in {1..300}; do sleep 0.1; done
    """
    tests = [bash("tests", hang), bash("after", "echo after")]
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for a background process of a shell
    try:
        code, found, table = sessions.run(tests, "--limit", "1")
    finally:
        signal.signal(signal.SIGINT, usual)
    assert code == 1
    assert (found["tests"]["status"], found["tests"]["tests"]) == ("cut off", {"first": "passed", "second": "begun"})
    assert table[0].endswith("1 passed, 1 begun, interrupted")
    assert found["after"]["status"] == "not begun"
    code, found, _ = sessions.run(tests)
    assert code == 0
    assert found["tests"]["tests"] == {"first": "passed", "second": "passed"}
    assert found["after"]["last"] == "after"


def test_tests_of_a_session_that_was_killed_count(sessions: Sessions) -> None:
    sessions.out.mkdir()
    (sessions.out / "tests.outcomes").write_text("passed first\n")
    _, found, _ = sessions.run([bash("tests", "echo failed second >> $1; exit 1")])
    assert found["tests"]["tests"] == {"first": "passed", "second": "failed"}


def test_no_tests_left_is_no_failure_where_some_have_passed(sessions: Sessions) -> None:
    """pytest's exit code for "no tests" is a failure only if no test has passed before."""
    part = bash("tests", "exit 5")
    assert sessions.run([part])[0] == 1
    (sessions.out / "tests.outcomes").write_text("passed first\n")
    assert sessions.run([part])[0] == 0


TESTS = """
import os
def test_fails(): assert os.environ.get("FIXED")
def test_passes(): pass
def test_ends(): os._exit(3) if not os.environ.get("FIXED") else None
def test_last(): pass
"""


def test_a_run_that_ended_early_goes_on_with_what_has_not_begun(tmp_path: Path) -> None:
    (tmp_path / "test_four.py").write_text(TESTS)

    def ran(**environment: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.outcomes", "-v"]
        options = ["--rootdir", str(tmp_path), "--outcomes", str(tmp_path / "outcomes"), str(tmp_path)]
        variables = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([*command, *options], env=variables, capture_output=True, text=True, cwd=tmp_path)
        return re.findall(r"::(\w+) ", done.stdout)

    assert ran() == ["test_fails", "test_passes", "test_ends"]
    assert ran(FIXED="1") == ["test_last", "test_fails", "test_ends"]


def test_without_a_build_nothing_else_runs(sessions: Sessions) -> None:
    code, found, _ = sessions.run([bash("build", "exit 1"), bash("tests", "echo never")])
    assert code == 1
    assert (found["tests"]["status"], found["tests"]["last"]) == ("skipped", "build has failed")


def test_a_tool_that_does_not_work_fails_once(sessions: Sessions) -> None:
    """If the probe of a tool fails, the parts that use the tool are skipped, and other parts still run."""
    after = ("build", "probe")
    code, found, _ = sessions.run(
        [bash("probe", "exit 1"), bash("check", "echo never", after=after), bash("other", "")]
    )
    assert code == 1
    assert [found[name]["status"] for name in ("probe", "check", "other")] == ["failed", "skipped", "ok"]
    assert found["check"]["last"] == "probe has failed"


def test_what_a_part_leaves_running_ends_with_it(sessions: Sessions, tmp_path: Path) -> None:
    sessions.run([bash("leaves", f"sleep 100 & echo $! > {tmp_path}/pid")])
    stat = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    deadline = time.monotonic() + 10
    while stat.exists() and stat.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_cannot_run_is_refused(
    sessions: Sessions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, message in ((["all"], "no part all; there are one"), (["--dry-run"], "session that was no dry run")):
        sessions.run([bash("one", "echo one")])
        with pytest.raises(SystemExit):
            session.main(["--out", str(sessions.out), *arguments])
        assert message in capsys.readouterr().err
    monkeypatch.setattr(session, "machine", lambda python: {"gpus": 0, "architecture": ""})
    with pytest.raises(SystemExit):
        session.main(["--out", str(sessions.out)])
    assert "sees no GPU" in capsys.readouterr().err


@pytest.mark.parametrize("versions", [{}, {"pytest": "8.4.2"}])
def test_without_a_new_pytest_only_the_benchmarks_run(versions: dict[str, str]) -> None:
    lacks = {part.name for part in parts("python", {**GPU, "gpus": 8, "versions": versions}) if "pytest" in part.needs}
    assert lacks >= {"tests", "sleeps", "sanitizer"}
    assert lacks.isdisjoint({"build", "primitives", "fused_kernels", "emulate_llama", "collectives_llama"})
    assert not any("pytest" in part.needs for part in parts("python", GPU))
    assert f'minversion = "{PYTEST}.0"' in (ROOT / "pyproject.toml").read_text()


def test_tests_run_in_several_processes_where_that_is_possible() -> None:
    versions = {**GPU["versions"], "pytest-xdist": "3.8.0"}
    for found, spread in (({**GPU, "versions": versions}, ["-n", str(WORKERS), "--dist", "loadfile"]), (GPU, [])):
        commands = {part.name: part.command for part in parts("python", found) if "--outcomes" in part.command}
        assert commands.keys() == {"tests", "timed_tests", "sleeps", "sanitizer"}
        for name, command in commands.items():
            begin = command.index("--maxfail=8") + 1
            together = spread if name != "timed_tests" else []
            assert command[begin : begin + 4] == together if together else "-n" not in command
        assert {f"--ignore={file}" for file in TIMED} <= {*commands["tests"]}
        assert {*TIMED} <= {*commands["timed_tests"]}


def test_parts_name_tests_and_commands_that_exist() -> None:
    made = parts("python", GPU)
    assert len({part.name for part in made}) == len(made)
    assert all((ROOT / file).exists() for file in TIMED)
    for test in CHECKED + CHECKED_ON_RANKS:
        path, function = re.match(r"(.*)::(\w+)", test).groups()  # type: ignore[union-attr]
        assert f"def {function}(" in (ROOT / path).read_text(), test
    assert all((ROOT / path).exists() for path in SANITIZED)
    build, *others = made
    assert build.environment["TORCH_CUDA_ARCH_LIST"] == "9.0a"
    assert {"tests", "sleeps", "sanitizer", "memcheck", "racecheck", "synccheck"} <= {part.name for part in others}
    assert parts("python", {"gpus": 0, "architecture": ""})[0].needs
    names = [part.name for part in made]
    for part in made:
        assert all(names.index(before) < names.index(part.name) for before in part.after), (
            "a part comes after the parts that it needs"
        )
        assert (PROBE in part.after) == ("--tool" in part.command and part.name != PROBE)
    links = {part.command[part.command.index("--link") + 1] for part in made if "--link" in part.command}
    assert links == {"pcie", "device"}


@pytest.mark.slow
def test_a_part_that_hangs_takes_its_own_time_only(sessions: Sessions, tmp_path: Path) -> None:
    """It counts as failed. In the next session, it runs after the parts that have not failed."""
    note = tmp_path / "note"
    hangs = bash("hangs", f"echo hangs >> {note}; exec sleep 100", limit=2)
    made = [hangs, bash("after", f"echo after >> {note}; exit $(wc -l < {note})")]
    code, found, _ = sessions.run(made)
    assert code == 1
    assert found["hangs"]["status"] == "failed"
    assert found["hangs"]["last"].startswith("took more than 2 s")
    sessions.run([hangs, bash("after", f"echo after >> {note}"), bash("new", f"echo new >> {note}")])
    assert note.read_text().split() == ["hangs", "after", "new", "hangs", "after"]


def test_what_was_cut_off_and_has_to_start_again_comes_last(sessions: Sessions, tmp_path: Path) -> None:
    note, hang = tmp_path / "note", "; exec sleep 100"
    for ending, *options in (hang, "--limit", "0.5"), (hang, "tests", "--limit", "0.5"), ("",):
        sessions.run([bash(name, f"echo {name} >> {note}{ending}") for name in ("rows", "tests", "new")], *options)
    assert note.read_text().split() == ["rows", "tests", "tests", "new", "rows"]


def test_every_target_that_was_judged_has_a_line(
    sessions: Sessions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [Verdict("a ratio", 1.05, 1.04, "one case").as_dict(), Verdict("a time", 80.0, 91.5, "another").as_dict()]
    made = [bash("rows", f"echo '{json.dumps({'targets': told})}' > $2"), bash("other", "echo fine")]
    monkeypatch.setattr(session, "parts", lambda python, machine: made)
    assert session.main(["--out", str(sessions.out)]) == 0
    assert capsys.readouterr().out.split("\n\n")[1].splitlines() == [
        "met     rows            a ratio: 1.040, at most 1.050; one case",
        "MISSED  rows            a time: 91.500, at most 80.000; another",
    ]


def test_what_the_targets_need_is_measured_first() -> None:
    names = [part.name for part in parts("python", GPU)]
    assert names[: len(FIRST) + 2] == ["build", *FIRST, "tests"]
    most = sum(part.limit for part in parts("python", GPU) if part.name in FIRST)
    assert most < 3 * 540, "even if all of them hang, three sessions of nine minutes reach the tests"
