"""Emulated peers on one GPU: results are right, signals are raised, and the link keeps its pace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import collective_matmul, start_order
from symm_overlap import _C

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("link", ["100GB/s", "pcie", "device"])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_every_method_is_right_and_the_link_keeps_its_pace(tmp_path: Path, world: int, link: str) -> None:
    file = tmp_path / "result.json"
    arguments = ["--device", "cuda", "--emulate", str(world), "--link", link, "--rounds", "2", "--ops", "ag,rs,ar"]
    assert collective_matmul.main([*arguments, "--shapes", f"{128 * world},96,64", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    judged = [row for row in rows if row["method"].startswith("ours") or row["method"] in ("sequential", "published")]
    assert all(row["ok"] for row in judged if row["median_ms"] is not None)
    assert {row["method"] for row in judged if row["median_ms"] is not None} >= {"ours", "published", "ours_fused"}


@pytest.mark.parametrize("world", [2, 3])
def test_every_method_is_right_in_a_graph(tmp_path: Path, world: int) -> None:
    file = tmp_path / "result.json"
    arguments = ["--device", "cuda", "--emulate", str(world), "--link", "device", "--rounds", "1", "--ops", "ag,rs,ar"]
    arguments += ["--shapes", f"{32 * world},32,16", "--graph", "3", "--json", str(file)]
    assert collective_matmul.main(arguments) == 0
    timed = [row for row in json.loads(file.read_text())["rows"] if row["median_ms"] is not None]
    assert all(row["ok"] for row in timed if row["method"].startswith("ours") or row["method"] == "sequential")
    assert {row["method"] for row in timed} >= {"matmul", "sequential", "ours", "published", "ours_fused"}


def test_ranks_in_a_gloo_group_time_in_a_graph_what_a_graph_can_hold(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    arguments = ["--device", "cuda", "--world", "2", "--rounds", "1", "--ops", "rs", "--shapes", "64,32,16"]
    arguments += ["--graph", "3", "--methods", "matmul", "plain", "plain_allocating", "ours", "--json", str(file)]
    assert collective_matmul.main(arguments) == 0
    rows = {row["method"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["ours"]["ok"]
    for name in ("plain", "plain_allocating"):
        assert rows[name]["median_ms"] is None
        assert "gloo" in rows[name]["reason"]


def test_what_crosses_the_link_is_a_share_of_the_bytes() -> None:
    clock, device = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.zeros(100, dtype=torch.uint8, device="cuda")
    host = torch.arange(1, 101, dtype=torch.uint8).pin_memory()
    given, half = host.clone(), torch.arange(1, 101, dtype=torch.uint8) * (torch.arange(100) < 20)
    torch.cuda.synchronize()
    link = _C.EmulatedLink(clock, host, device, 0.5, 0.25)
    link.cross(40, True)
    torch.cuda.synchronize()
    assert torch.equal(device.cpu(), half)
    link.cross(120, False)
    torch.cuda.synchronize()
    assert torch.equal(host, torch.where(torch.arange(100) < 30, half, given))
    link.cross(1000, True)  # more than there is memory for
    assert torch.equal(device.cpu(), host)
    with pytest.raises(ValueError, match="0 or more bytes"):
        _C.EmulatedLink(clock, host, device, 0.5, -1.0)
    with pytest.raises(ValueError, match="on the GPU of its clock"):
        _C.EmulatedLink(clock, host, host, 0.5, 0.5)


def test_stamps_come_in_the_order_of_the_stream() -> None:
    times = torch.zeros(3, dtype=torch.int64, device="cuda")
    for index in range(3):
        _C.stamp(times, index)
        torch.cuda._sleep(1_000_000)
    first, second, third = times.tolist()
    assert 0 < first < second < third


def test_start_orders_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    arguments = ["--emulate", "4", "--runs", "5", "--rounds", "2", "--shapes", "1024,256,128", "--json", str(file)]
    assert start_order.main(arguments) == 0
    for row in json.loads(file.read_text())["rows"]:
        assert row["compute0_first"] + row["compute1_first"] + row["equal"] == 5
        assert row["agree"] == 5 - row["equal"], "a single rank must always agree with itself"
