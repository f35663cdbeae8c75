"""``torchrun -m bench.collective_matmul``: the ranks are processes that torchrun has started."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench import collective_matmul
from bench.harness.launch import leave
from tests.ranks import forks

WORLD = 2


def rank_main(environment: dict[str, str], arguments: Sequence[str]) -> None:
    os.environ.update(environment)
    leave(collective_matmul.main(arguments))


def run(*arguments: str) -> list[int | None]:
    """Start the ranks as torchrun does, as clients of a store that already exists. Return their exit codes."""
    context = forks()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = []
    for rank in range(WORLD):
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(context.Process(target=rank_main, args=(environment, arguments)))
        ranks[-1].start()
    for process in ranks:
        process.join(60)
        if process.is_alive():
            process.kill()
    return [process.exitcode for process in ranks]


def test_the_ranks_of_torchrun_measure_and_the_first_one_writes(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    methods = ["matmul", "plain", "torch_native", "published", "ours"]
    arguments = ["--shapes", "32,16,64", "--rounds", "1", "--json", str(file), "--methods", *methods]
    assert run(*arguments) == [0, 0]
    found = json.loads(file.read_text())
    assert found["environment"]["ranks"] == WORLD
    assert found["memory"] == []
    rows = {(row["op"], row["method"]): row for row in found["rows"]}
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        for method in ("plain", "published", "ours"):
            assert rows[op, method]["exact"], rows[op, method]["detail"]
            assert len(rows[op, method]["rank_median_ms"]) == WORLD
    assert "no kernel for cpu" in rows["all_gather_matmul", "torch_native"]["reason"]


def test_ranks_on_two_hosts_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "there"}
    for name, value in sizes.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="torchrun has 4 ranks, 2 of them on this host: all 4 must be on this host"):
        collective_matmul.main(["--shapes", "32,16,64"])
    with pytest.raises(SystemExit):
        collective_matmul.main(["--emulate", "2", "--shapes", "32,16,64"])
    assert "and not under torchrun" in capsys.readouterr().err
