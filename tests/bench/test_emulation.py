"""``bench.collective_matmul --emulate`` on CPU, from the arguments to the JSON: one real rank and emulated peers, the
phantoms.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench import collective_matmul, results
from bench.emulation import link as links
from bench.emulation import run
from bench.emulation.contents import Contents, phantom_regions
from bench.emulation.link import HostPacer, Link, across, pieces
from bench.emulation.mirror import ControlMemory, HostSignals
from bench.emulation.rank import emulated
from bench.emulation.targets import emulated_verdicts
from bench.harness.case import Case, inputs, reference
from bench.methods.emulated import METHODS
from symm_overlap import _C
from symm_overlap.collective.planners import (
    all_gather_consume,
    fused_matmul_all_reduce,
    fused_matmul_reduce_scatter,
    produce_all_reduce,
)
from symm_overlap.plan import Region
from tests.runtime.host_program import HOST, compile_program, run_program

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
GPU_ONLY = {"ours_memory_waits", "ours_fused"}


def test_the_command_checks_and_times_every_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    arguments = ["--emulate", "4", "--link", "1GB/s", "--shapes", "32,16,64", "--ops", "ag,rs", "--rounds", "1"]
    code = collective_matmul.main([*arguments, "--json", str(file)])
    found = json.loads(file.read_text())
    assert code == (0 if found["link"]["kept"] else 1), "a link that does not keep its pace is a failure"
    assert found["link"]["kept"] == (abs(found["link"]["bytes_per_second"] / 1e9 - 1) <= 0.03)
    assert [row["op"] for row in found["rows"] if row["method"] == "ours"] == list(OPS[:2])
    for row in found["rows"]:
        assert row["emulated"]
        assert (row["world"], row["m"], row["n"], row["k"]) == (4, 32, 16, 64)
        if row["median_ms"] is None:
            assert row["method"] in (*GPU_ONLY, "matmul_of_ours")
            continue
        assert min(row["median_ms"], row["host_us"], row["ahead_us"], row["usual_us"], row["each_ms"]) > 0
        if row["method"] in ("sequential", "published", "ours", "ours_kernel_waits", "ours_parts", "ours_span"):
            assert row["ok"], f"{row['op']} {row['method']}: {row['detail']}"
    spans = {row["method"]: row["span"] for row in found["rows"] if row["op"] == OPS[1] and "span" in row}
    assert (spans["ours_parts"], spans["ours_span"]) == (1, 3)
    printed = capsys.readouterr().out
    assert results.main([str(file)]) == 0
    assert "*Emulated*: one rank, whose peers are memory; link 1GB/s: " in capsys.readouterr().out
    assert "emulated: 1 real rank and 3 phantoms; link 1GB/s" in printed
    assert printed.count("emulated, link 1GB/s") == 2
    assert "host us" in printed
    (copies,) = [row for row in found["rows"] if (row["op"], row["method"]) == (OPS[1], "copies")]
    (matmul,) = [row for row in found["rows"] if (row["op"], row["method"]) == (OPS[1], "matmul")]
    longer, shorter = sorted((copies["median_ms"], matmul["median_ms"]), reverse=True)
    assert copies["median_ms"] <= copies["bound_ms"] <= longer + shorter / 4
    assert copies["bytes_per_second"] == pytest.approx(3 * 8 * 16 * 4 / copies["median_ms"] * 1e3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--traces", "folder"], "give --exposed too"),
        (["--device", "cuda", "--graph", "3", "--exposed"], "leave out --graph"),
        (["--nvtx"], "give it with --device cuda"),
        (["--device", "cuda", "--nvtx", "--exposed"], "without --exposed"),
        (["--emulate", "1"], "give 2 ranks or more"),
        (["--emulate", "4", "--link", "fast"], "--link is 'fast'; give a speed such as 369GB/s"),
        (["--emulate", "4", "--link", "0GB/s"], "--link is '0GB/s'"),
        (["--emulate", "3", "--shapes", "32,16,64"], "cannot be split over 3 ranks"),
        (["--launches"], "give --emulate W too"),
        (["--emulate", "4", "--methods", "plain"], "--methods has plain; give some of matmul, "),
        (["--emulate", "4", "--graph", "3"], "--graph 3 --device cpu: give --graph 1 or more, with --device cuda"),
        (["--device", "cuda", "--graph", "0"], "--graph 0 --device cuda: give --graph 1 or more, with --device cuda"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        collective_matmul.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_launches_are_those_of_a_call_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--emulate", "3", "--launches", "--shapes", "3840,64,2048", "--ops", "ag,rs", "--dtype", "bfloat16"]
    assert collective_matmul.main(arguments) == 0
    assert capsys.readouterr().out == (Path(__file__).parent / "emulated_launches.txt").read_text()


def test_a_link_is_a_speed_or_a_place() -> None:
    """``--link`` is a speed, or the place of the phantoms' memory: ``pcie`` (host) or ``device``."""
    assert Link.parse("369GB/s").bytes_per_second == 369e9
    assert Link.parse("0.5 MB/s").nanoseconds(1000) == 2_000_000
    assert Link.parse("pcie") == Link("pcie", on_host=True)
    assert Link.parse("device") == Link("device")


def test_pieces_cover_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PIECE", 10)
    for units, size in [(0, 4), (1, 4), (7, 4), (5, 30), (40, 1)]:
        found = list(pieces(units, size))
        assert [unit for begin, count in found for unit in range(begin, begin + count)] == list(range(units))
        assert all(count == 1 or count * size <= 10 for _, count in found)


def test_a_copy_takes_as_long_as_the_link_says_and_two_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies at the same time share the bandwidth of the link."""
    monkeypatch.setattr(links, "PIECE", 1 << 10)
    link, pacer = Link.parse("1MB/s"), HostPacer()
    source, targets = torch.arange(5000, dtype=torch.uint8).view(-1, 50), [torch.zeros(100, 50) for _ in range(2)]
    begin = time.monotonic()
    threads = [threading.Thread(target=across, args=(link, pacer, target, source)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin >= 0.01, "10000 bytes at a million a second"
    assert all(torch.equal(target, source.float()) for target in targets)
    time.sleep(0.002)
    begin = time.monotonic()
    across(link, pacer, targets[0], source)
    assert time.monotonic() - begin >= 0.005, "idle time of the link is not credited to a later copy"


def test_waits_that_end_late_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each wait of the pacer ends a little late, the total time is late only once."""
    clock = [0]
    late = 70_000  # nanoseconds; every wait takes at least this long

    def sleep(seconds: float) -> None:
        clock[0] += max(late, round(seconds * 1e9))

    monkeypatch.setattr(links, "time", SimpleNamespace(monotonic_ns=lambda: clock[0], sleep=sleep))
    clock[0], pacer = 10**9, HostPacer()
    pacer.pace(0)
    for _ in range(20):
        pacer.pace(100_000)
        pacer.pace(0)  # the next copy follows at once
    assert 2_000_000 <= clock[0] - 10**9 <= 2_000_000 + late


def test_a_phantom_signals_when_the_rank_that_mirrors_it_is_signalled() -> None:
    signals = HostSignals(4)
    signals.signal((1,), 0)
    signals.wait((3,), 0, 1.0)
    with pytest.raises(dist.DistBackendError, match=r"emulated signal of rank 3 on channel 0: not raised in 0\.01 s"):
        signals.wait((3,), 0, 0.01)
    signals.signal((2, 3), 1)
    signals.wait((1, 2), 1, 1.0)
    signals.barrier(1, 1.0)
    signals.give_up()
    with pytest.raises(dist.DistBackendError, match="the call has failed"):
        signals.wait((1,), 0, 1000.0)


def test_control_blocks_of_a_gpu_mirror_signals_too(tmp_path: Path) -> None:
    run_program(compile_program(HOST / "mirror.cpp", tmp_path / "mirror"))


@pytest.mark.skipif(not _C.with_cuda, reason="the extension was built without CUDA")
def test_the_block_of_a_peer_is_where_its_mirror_reads() -> None:
    world, channels = 4, 9
    memory = ControlMemory(world, channels, torch.device("cpu"))
    assert memory.control.numel() == _C.CudaLane.control_words(world, channels)
    for peer in range(1, world):
        for channel in range(channels):
            written = memory.get_remote_tensor(peer, [1], torch.int32)[_C.CudaLane.slot(world, channels, 0, channel) :]
            read = memory.control[_C.CudaLane.slot(world, channels, world - peer, channel) :]
            assert written.data_ptr() == read.data_ptr()


def test_what_phantoms_write_follows_from_the_plan() -> None:
    gathers = phantom_regions(all_gather_consume(0, 3, chunks=2))
    assert gathers == [Region("workspace", peer, piece, piece + 1) for peer in (1, 2) for piece in (0, 1)]
    sums = phantom_regions(produce_all_reduce(0, 2, chunks=1))
    assert sums == [Region("workspace", 1, 0, 1), Region("workspace", 1, 1, 2)]
    pushed = phantom_regions(fused_matmul_reduce_scatter(0, 3))
    assert pushed == [Region("workspace", 0, peer, peer + 1) for peer in (1, 2)]
    sums = phantom_regions(fused_matmul_all_reduce(0, 3))
    assert sums == [*pushed, *(Region("workspace", peer, peer, peer + 1) for peer in (1, 2))]


def test_phantoms_have_the_chunks_of_their_ranks() -> None:
    cpu = torch.device("cpu")
    gather, scatter, reduce = (Case(op, 15, 5, 4, torch.float64, 3) for op in OPS)  # 5 rows a rank: 3 and 2

    def at(case: Case, region: Region, numel: int) -> torch.Tensor:
        return Contents(case, "binary", cpu).at(region, 2, numel)

    shard = inputs(gather, 2, "binary", cpu)[0]
    assert torch.equal(at(gather, Region("workspace", 2, 0, 1), 12), shard[:3])
    assert torch.equal(at(gather, Region("workspace", 2, 1, 2), 8), shard[3:])
    a, b = inputs(scatter, 2, "binary", cpu)
    for fetched_or_pushed in (Region("workspace", 2, 1, 2), Region("workspace", 0, 5, 6)):
        assert torch.equal(at(scatter, fetched_or_pushed, 10), (a @ b)[3:5])
    total = sum(x @ y for x, y in (inputs(reduce, rank, "binary", cpu) for rank in range(3)))
    assert isinstance(total, torch.Tensor)
    assert torch.equal(at(reduce, Region("workspace", 1, 3, 4), 10), total[8:10])
    assert torch.equal(at(reduce, Region("workspace", 2, 0, 1), 75), a @ b), "all of it if every rank sums it"


@pytest.mark.parametrize("op", OPS)
def test_every_phantom_counts(op: str) -> None:
    """A phantom with other contents changes the result, so the result really uses the data of every phantom."""
    case = Case(op, 6, 5, 4, torch.float64, 3)
    a, b = inputs(case, 0, "binary", torch.device("cpu"))
    with emulated(3, "cpu", Link.parse("device")) as rank:
        prepared = METHODS["ours_kernel_waits"].prepare(rank, case, a, b)
        prepared.load("binary")
        assert prepared.results is not None

        def output() -> Any:
            with prepared.around():
                return prepared.results(prepared.call())["output"]

        expected = reference(case, 0, "binary", torch.device("cpu"))["output"]
        for _ in range(4):
            assert torch.equal(output(), expected)
        for peer in (1, 2):
            prepared.load("binary")
            rank.phantoms(rank.lane(3)).ranks[peer].fill_(0xFF)
            assert output().isnan().any(), f"rank {peer}"


def test_verdicts_are_of_the_worst_case_and_the_mean() -> None:
    def rows(m: int, ours: float) -> list[dict[str, Any]]:
        times = {"matmul": 8.0, "copies": 4.0, "sequential": 12.0, "published": 11.5, "ours": ours}
        size = {"op": "all_gather_matmul", "m": m, "n": 1, "k": 1, "dtype": "bfloat16", "world": 4, "link": "369GB/s"}
        return [{**size, "method": name, "median_ms": ms, "paced": False} for name, ms in times.items()]

    host = {**rows(8, 9.0)[0], "method": "ours_fused", "median_ms": 9.0, "host_us": 50.0}
    found = {one.target: one for one in emulated_verdicts([*rows(8, 9.0), host, *rows(16, 10.0)])}
    assert [(one.figure, one.met) for one in found.values()] == [
        (pytest.approx(10 / 9), False),
        (pytest.approx((9 * 10) ** 0.5 / 11.5), True),
        (pytest.approx(10 / 12), True),
        (50.0, False),
    ]
    assert len(emulated_verdicts([{**host, "paced": True}])) == 0, "pacing takes host time too, so it is not judged"
    other = [{**row, "link": "pcie"} for row in (*rows(8, 9.0), host)]
    assert [one.figure for one in emulated_verdicts(other)] == [50.0], "the other targets are those of one link"


def test_a_case_that_fails_does_not_lose_the_rows_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original, file = run.run_case, tmp_path / "result.json"

    def failing(rank: Any, case: Any, *more: Any, **options: Any) -> Any:
        if case.n == 24:
            raise RuntimeError("the GPU has fallen off")
        return original(rank, case, *more, **options)

    monkeypatch.setattr(run, "run_case", failing)
    arguments = ["--emulate", "2", "--link", "device", "--rounds", "1", "--ops", "ag", "--json", str(file)]
    assert collective_matmul.main([*arguments, "--shapes", "32,16,16", "32,24,16", "32,32,16"]) == 1
    found = json.loads(file.read_text())
    assert {row["n"] for row in found["rows"]} == {16}
    assert found["link"]["stopped"].endswith("RuntimeError: the GPU has fallen off")
    assert "stopped at all_gather_matmul  M 32" in capsys.readouterr().err
