"""A session on a machine with GPUs: build, test, check and measure. ``bench/gpu_session.sh`` runs it.

    bench/gpu_session.sh --out results            all parts (`bench.session_parts`), for at most nine minutes
    bench/gpu_session.sh --out results            again: skip the parts that succeeded, and continue the others
    bench/gpu_session.sh --out results tests      one part
    bench/gpu_session.sh --dry-run                without a GPU

The folder of ``--out`` gets two files. ``session.json`` describes the machine and contains, for each part, its status,
the outcome of each test, and the rows of a benchmark. ``session.log`` contains everything that was printed. To continue
a session on another machine, copy both files there.

When time runs out, the running part is interrupted with Ctrl-C, so that it can report, and killed if it does not end
soon after. The next session continues such a part: tests that have not begun run first, then tests that have not
passed. Any other part starts again from the beginning, after the parts that have not begun, since it may hang. So does
a part that has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from bench.session_parts import OUTCOMES, RESULT, Part, parts

_LEAST = 3.0  # seconds; no part is started with less time left
_GRACE = 40.0  # seconds that a part has to report after Ctrl-C
_NO_TESTS_LEFT = 5  # pytest's exit code when it selected no tests

_MACHINE = """
import json, torch
from importlib.metadata import distributions
names = {"torch", "triton", "setuptools", "ninja", "pytest", "pytest-xdist", "numpy"}
found = {d.name: d.version for d in distributions() if d.name in names}
gpus = torch.cuda.device_count()
a, b = torch.cuda.get_device_capability() if gpus else (0, 0)
print(json.dumps({
    "versions": found,
    "cuda": torch.version.cuda,
    "gpus": gpus,
    "names": [torch.cuda.get_device_name(gpu) for gpu in range(gpus)],
    "architecture": f"{a}.{b}" + "a" * (a >= 9) if gpus else "",
}))
"""
_BUILT = "from symm_overlap import _C; raise SystemExit(not _C.with_cuda)"


def machine(python: str) -> dict[str, Any]:
    """Return what torch and the driver report about this machine. "gpus" is a number, "versions" a dict by package."""
    told = subprocess.run([python, "-c", _MACHINE], capture_output=True, text=True, check=True, timeout=120)
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    nvcc = str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc"))
    for name, command in (("driver", ["nvidia-smi"]), ("nvcc", [nvcc, "--version"])):
        try:
            found[name] = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.splitlines()
        except (OSError, subprocess.SubprocessError) as error:
            found[name] = [str(error)]
    return found


class Session:
    """The record of what has been done, and the runner of further parts in the remaining time.

    Args:
        out: the folder for the session's files.
        dry: whether this is a dry run.
        limit: the time from now, in seconds, after which parts are interrupted.
    """

    def __init__(self, python: str, out: Path, dry: bool, limit: float) -> None:
        self._python, self._out, self._dry = python, out, dry
        self._end = time.monotonic() + limit
        self._file = out / "session.json"
        self.state: dict[str, Any] = {"parts": {}}
        if self._file.exists():
            self.state = json.loads(self._file.read_text())

    def run(self, part: Part, again: bool) -> None:
        """Run a part, or continue it, unless it has succeeded before."""
        record = self.state["parts"].setdefault(part.name, {})
        if record.get("status") == "ok" and not again and self._holds(part):
            print(f"== {part.name}: skipped, because it has succeeded before", flush=True)
            return
        if again:
            record.clear()
            self._outcomes(part).unlink(missing_ok=True)
        failed = [name for name in part.after if self.state["parts"].get(name, {}).get("status") == "failed"]
        if part.needs and not self._dry:
            record.update(status="skipped", last=part.needs)
        elif failed:
            record.update(status="skipped", last=f"{failed[0]} has failed")
        elif self._end - time.monotonic() < _LEAST:
            record.setdefault("status", "not begun")
        else:
            self._run(part, record)
        self.save()

    def was_in_vain(self, part: Part) -> bool:
        """Return whether a part has failed so far, or was cut off and cannot be continued."""
        status = self.state["parts"].get(part.name, {}).get("status")
        return status == "failed" or (status == "cut off" and OUTCOMES not in part.command)

    def _outcomes(self, part: Part) -> Path:
        """Return the file in which a running part records the outcomes of its tests."""
        return self._out / f"{part.name}.outcomes"

    def _holds(self, part: Part) -> bool:
        """True if a part's earlier success holds on this machine.

        The build may not: the session's files may come from another machine, without the built module.
        """
        if part.name != "build" or self._dry:
            return True
        return subprocess.run([self._python, "-c", _BUILT], capture_output=True).returncode == 0

    def _run(self, part: Part, record: dict[str, Any]) -> None:
        outcomes, result = self._outcomes(part), self._out / f"{part.name}.json"
        if OUTCOMES in part.command and not outcomes.exists():  # an existing file is from a session that was killed
            outcomes.write_text("".join(f"{outcome} {test}\n" for test, outcome in record.get("tests", {}).items()))
        places = {OUTCOMES: str(outcomes), RESULT: str(result)}
        command = [_put(word, places) for word in (part.dry if self._dry else part.command)]
        print(f"== {part.name}: {' '.join(command)}", flush=True)
        start = time.monotonic()
        with (self._out / "session.log").open("a+b") as log:
            log.write(f"\n== {part.name}: {' '.join(command)}\n".encode())
            log.flush()
            begin = log.tell()
            code, cut_off = self._wait(command, part.environment, log, part.limit)
            log.seek(begin)
            lines = log.read().decode(errors="replace").splitlines()
        if OUTCOMES in part.command:
            noted = (line.partition(" ") for line in outcomes.read_text().splitlines())
            record["tests"] = {test: outcome for outcome, _, test in noted}
            outcomes.unlink()
            if code == _NO_TESTS_LEFT and record["tests"]:
                code = 0
        if result.exists():
            record["result"] = json.loads(result.read_text())
            result.unlink()
        spent, last = time.monotonic() - start, next((line.strip() for line in reversed(lines) if line.strip()), "")
        too_long = cut_off and spent >= part.limit
        record.update(
            status="failed" if too_long else "cut off" if cut_off else "failed" if code else "ok",
            exit=code,
            seconds=round(record.get("seconds", 0.0) + spent, 1),
            last=f"took more than {part.limit:g} s: {last}"[:200] if too_long else last[:200],
            command=command,
        )

    def _wait(
        self, command: Sequence[str], environment: dict[str, str], log: IO[bytes], most: float
    ) -> tuple[int, bool]:
        """Run a command for at most ``most`` seconds. Return its exit code, and whether it had to be interrupted."""
        variables = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",  # the log of a part that was killed must contain its last output, too
            "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # streams that share a hardware queue wait for each other
            **environment,
        }
        # In its own process group, so that processes that the command starts can be killed with it.
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=variables, start_new_session=True, preexec_fn=_take_interrupts
        )
        try:
            return process.wait(max(0.1, min(most, self._end - time.monotonic()))), False
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                return process.wait(_GRACE), True
            except subprocess.TimeoutExpired:
                return -signal.SIGKILL, True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def save(self) -> None:
        """Write the state in one atomic step, because the machine may be taken away at any time."""
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self.state, indent=1) + "\n")
        new.replace(self._file)

    def table(self, names: Sequence[str]) -> str:
        """Return a line for each part."""
        lines = []
        for name in names:
            record = self.state["parts"][name]
            count = Counter(record.get("tests", {}).values())
            tests = "".join(f"{number} {outcome}, " for outcome, number in sorted(count.items(), reverse=True))
            seconds, last = record.get("seconds", 0.0), record.get("last", "")[:90]
            lines.append(f"{name:15}{record['status']:10}{seconds:>7.1f} s  {tests}{last}")
        return "\n".join(lines)

    def targets(self, names: Sequence[str]) -> str:
        """Return a line for each target that a part has judged. Results of a part that was cut off count, too."""
        if self._dry:
            return "the times of a dry run are meaningless: no target is judged"
        lines = []
        for name in names:
            for one in self.state["parts"][name].get("result", {}).get("targets", ()):
                word, figures = "met" if one["met"] else "MISSED", f"{one['figure']:.3f}, at most {one['limit']:.3f}"
                lines.append(f"{word:8}{name:16}{one['target']}: {figures}; {one['where']}")
        return "\n".join(lines or ["no target was judged"])


def _take_interrupts() -> None:
    """In a new process, let Ctrl-C work again.

    A shell's background jobs ignore Ctrl-C, and the processes that they start inherit that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _put(word: str, places: dict[str, str]) -> str:
    for name, place in places.items():
        word = word.replace(name, place)
    return word


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts. Return 0 if all parts that can run here succeeded, 1 if one did not, 2 if nothing can run."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="bench/gpu_session.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="parts to run (default: all, in order)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu_results")), metavar="DIR")
    parser.add_argument(
        "--limit", type=float, default=540.0, metavar="SECONDS", help="time for all parts (default 540)"
    )
    parser.add_argument("--again", action="store_true", help="also run parts that have succeeded before")
    parser.add_argument("--dry-run", action="store_true", help="run without a GPU, as far as a CPU can")
    options = parser.parse_args(arguments)
    python = sys.executable
    here = {"gpus": 0, "architecture": ""} if options.dry_run else machine(python)
    if not options.dry_run and not here["gpus"]:
        parser.error(f"{python} sees no GPU: choose another with PYTHON=..., or --dry-run")
    known = {part.name: part for part in parts(python, here)}
    if unknown := [name for name in options.parts if name not in known]:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(known)}: give some of these, or none for all")
    options.out.mkdir(parents=True, exist_ok=True)
    session = Session(python, options.out, options.dry_run, options.limit)
    if session.state.setdefault("dry_run", options.dry_run) != options.dry_run:
        parser.error(
            f"{options.out} has results of a session that was {'no ' * options.dry_run}dry run: use another --out"
        )
    session.state["machine"] = here
    names = options.parts or list(known)
    needed = {before for part in known.values() for before in part.after}
    # Parts that were in vain before do not take the time of those that have not run yet.
    for name in sorted(names, key=lambda name: name not in needed and session.was_in_vain(known[name])):
        session.run(known[name], options.again)
    print("", session.targets(names), "", session.table(names), sep="\n")
    return int(any(session.state["parts"][name]["status"] not in ("ok", "skipped") for name in names))


if __name__ == "__main__":
    sys.exit(main())
