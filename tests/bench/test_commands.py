"""The commands of the benchmarks, from their arguments to the JSON that they write."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from bench import collective_matmul, gpu_host, one_shot, plan_issue, primitives, results


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_collective_matmul_writes_environment_and_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    code = collective_matmul.main(
        ["--shapes", "32,16,64", "--ops", "ag,rs,ar", "--rounds", "2", "--no-memory", "--json", str(file)]
    )
    assert code == 0
    found = json.loads(file.read_text())
    assert {"cpu", "cores", "torch", "commit", "threads_per_rank"} <= found["environment"].keys()
    by_op: dict[str, dict[str, dict[str, object]]] = {}
    for row in found["rows"]:
        assert {"op", "m", "n", "k", "dtype", "world", "method", "median_ms"} <= row.keys()
        assert (row["m"], row["n"], row["k"], row["world"], row["dtype"]) == (32, 16, 64, 2, "float32")
        by_op.setdefault(row["op"], {})[row["method"]] = row
    assert list(by_op) == ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
    for op, methods in by_op.items():
        for name in ("matmul", "copies", "plain", "ours", "ours_no_waits", "ours_no_waits_no_copies"):
            assert methods[name]["median_ms"], f"{op} {name}: {methods[name].get('reason')}"
        for name, row in methods.items():
            if name.endswith("of_ours") and row["median_ms"] is None:  # torch's own matmul is quicker
                assert row["reason"] == "ours calls torch.mm"
                continue
            if name.startswith("plain") or name in ("ours", "ours_no_gathered", "ours_symmetric"):
                assert row["exact"], f"{op} {name}: {row['detail']}"
                assert row["ok"], f"{op} {name}: error {row['relative_error']}"
    assert "no kernel for cpu" in str(by_op["all_gather_matmul"]["torch"]["reason"])
    assert "ours_no_gathered" not in by_op["matmul_reduce_scatter"]
    assert "not available: torch.ops.symm_mem has no kernel for cpu" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "nothing"], "shape set is 'nothing'"),
        (["--ops", "ag,xx"], "--ops has xx; give some of ag, rs, ar"),
        (["--world", "0"], "--world, --rounds and --threads must be 1 or more"),
        (["--world", "3", "--shapes", "32,16,64"], "cannot be split over 3 ranks"),
    ],
)
def test_bad_arguments_are_refused_before_any_rank_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        collective_matmul.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
def test_one_shot_times_both_ways_at_every_size(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert one_shot.main(["--blocks", "1", "--json", str(file)]) in (
        0,
        1,
    )  # which way is quicker in a single block is random
    rows = json.loads(file.read_text())["rows"]
    assert [row["kib"] for row in rows] == list(one_shot.KIB)
    assert [row["kib"] for row in rows if row["chosen"]] == [2, 8, 32, 64, 128]
    assert all(row["one_shot_us"] > 0 and row["shared_out_us"] > 0 for row in rows)


def test_gpu_host_counts_what_every_op_launches(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    gpu_host.main(["--calls", "5", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    of_fsdp = [row for row in rows if row["path"] == "fsdp"]
    assert {row["op"] for row in of_fsdp} == {"all_gather", "reduce_scatter"}
    assert [row["large"] for row in of_fsdp] == [1, 7] * 2, "one copy from each peer, or one sum for each"
    rows = [row for row in rows if row not in of_fsdp]
    paths = [path for path in gpu_host.PATHS if path != "fsdp"]
    assert {(row["path"], row["op"]) for row in rows} == set(itertools.product(paths, gpu_host.OPS))
    for row in rows:
        spans = row["span"] > 1
        copies, matmuls = row["world"] - 1, 3 if spans else row["world"] if row["path"] == "pipelined" else 1
        assert row["large"] >= copies + matmuls
        assert row["small"] >= (4 if spans else row["world"])
        assert row["events"] > 0
    assert max(row["small"] for row in rows if (row["world"], row["chunks"]) == (8, 1)) <= gpu_host.TARGET_SMALL
    judged = [row for row in rows if (row["path"], row["world"], row["chunks"]) == ("fused", 8, 1)]
    assert [row["driver"] for row in judged] == [23, 33, 47]
    assert [row["driver"] for row in rows if row["span"] == 4] == [23, 35, 50]
    alone = [row for row in rows if [row[key] for key in ("path", "world", "chunks", "span")] == ["pipelined", 8, 1, 1]]
    assert [row["driver"] for row in alone] == [43, 60, 77]
    # Five calls on a machine that may be busy: the times are not compared here.
    assert all(row["us_to_issue"] > 0 and row["us_per_call"] > 0 for row in rows)


def test_plan_issue_times_every_planner(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    plan_issue.main(["--calls", "20", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert {row["op"] for row in rows} == {"all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"}
    assert {row["streams"] for row in rows} == {"inline", "caller", "threads"}
    assert all(row["us_per_step"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_primitives_times_barriers_of_2_and_4_ranks(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    primitives.main(["--calls", "200", "--json", str(file)])
    rows = {(row["primitive"], row["world"]): row for row in json.loads(file.read_text())["rows"]}
    assert rows.keys() == {("barrier", 2), ("ping-pong", 2), ("barrier", 4)}
    assert all(row["median_us"] > 0 for row in rows.values())
    assert rows["barrier", 2]["target_us"] == 2.0


def test_results_sets_a_loss_in_bold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = {"op": "all_gather_matmul", "m": 64, "n": 8, "k": 16, "dtype": "float32", "world": 2}
    rows = [{**case, "method": name, "median_ms": ms} for name, ms in (("plain", 2.0), ("ours", 2.5), ("matmul", 1.0))]
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"environment": {"cpu": "some"}, "rows": rows, "memory": [], "targets": []}))
    assert results.main([str(file)]) == 0
    assert "| all_gather_matmul | 64, 8, 16 | 1 | 2 | 2.5 | **1.25** | 2.50 |" in capsys.readouterr().out


def test_results_refuses_another_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(SystemExit):
        results.main([str(tmp_path / "other.json")])
    assert "is not a result of bench.collective_matmul" in capsys.readouterr().err
