"""`symm-overlap info` says which paths work and why the others do not, also for hardware that this machine lacks."""

from __future__ import annotations

import pytest
import torch

from symm_overlap.cli.__main__ import main
from symm_overlap.cli.info import path_rows

KERNELS = {"no_interpreter": None, "no_kernel": None}


def test_info_says_what_is_here_and_why_the_rest_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    for section in ("versions", "devices", "GPU pairs", "symmetric memory", "paths"):
        assert f"{section}\n" in shown
    assert f"torch           {torch.__version__}\n" in shown
    assert "pipelined       cpu: yes; cuda: " in shown
    assert "fused           cpu: " in shown
    if not torch.cuda.is_available():
        assert "cuda            none: " in shown


def test_without_a_gpu_every_path_says_so_for_cuda() -> None:
    rows = dict(path_rows(gloo=True, no_memory=None, no_cuda="torch sees no GPU", apart=[], **KERNELS))
    for path in ("single", "sequential", "pipelined", "c10d"):
        assert rows[path].startswith("cpu: yes; cuda: no, torch sees no GPU")


def test_gpus_without_peer_access_cannot_take_the_pipelined_path() -> None:
    rows = dict(path_rows(gloo=True, no_memory=None, no_cuda=None, apart=[(0, 2)], **KERNELS))
    assert "cuda: no, no peer access between GPUs 0 and 2" in rows["pipelined"]
    assert "cuda: yes" in rows["c10d"]


def test_without_shared_memory_the_cpu_has_the_other_paths() -> None:
    rows = dict(path_rows(gloo=True, no_memory="there is no /dev/shm", no_cuda=None, apart=[], **KERNELS))
    assert rows["pipelined"].startswith("cpu: no, there is no /dev/shm; cuda: yes")
    assert rows["sequential"].startswith("cpu: yes")


def test_without_gloo_one_rank_remains_on_cpu() -> None:
    rows = dict(path_rows(gloo=False, no_memory=None, no_cuda="x", apart=[], **KERNELS))
    assert rows["single"].startswith("cpu: yes")
    for path in ("sequential", "pipelined", "c10d"):
        assert rows[path].startswith("cpu: no, this torch has no gloo")


def test_fused_kernels_need_an_interpreter_on_cpu_and_a_known_gpu() -> None:
    facts = {"gloo": True, "no_memory": None, "no_cuda": None, "apart": []}
    fused = dict(path_rows(**facts, no_interpreter="nobody interprets it", no_kernel=None))["fused"]  # type: ignore[arg-type]
    assert fused.startswith("cpu: no, nobody interprets it; cuda: yes")
    fused = dict(path_rows(**facts, no_interpreter=None, no_kernel="no kernel is known for sm_75"))["fused"]  # type: ignore[arg-type]
    assert fused.startswith("cpu: yes; cuda: no, no kernel is known for sm_75")


def test_info_knows_whether_triton_interprets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["info"]) == 0
    assert "fused           cpu: yes; cuda: no, " in capsys.readouterr().out
    monkeypatch.delenv("TRITON_INTERPRET")
    assert main(["info"]) == 0
    assert "fused           cpu: no, kernels run only in Triton's interpreter there" in capsys.readouterr().out
