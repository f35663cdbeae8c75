"""The configuration of a training run: model sizes by name, all settings in one frozen record, and their checks.

The checks need no other process. They run before any rank is started, so that a wrong argument is reported at once, in
one line.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

VOCABULARY = 256  # the model reads and writes bytes
MOST_BYTES = 2**31  # of a step; it is read as int64, which is eight times as large


@dataclass(frozen=True)
class ModelSize:
    """``layers`` blocks of width ``dim``: attention with ``heads`` heads, and a SwiGLU of width ``hidden``.

    ``seq``, ``batch`` and ``lr`` are the defaults for a run of this size.
    """

    dim: int
    layers: int
    heads: int
    hidden: int
    seq: int
    batch: int
    lr: float

    @property
    def pieces(self) -> int:
        """The number of pieces a pipeline can cut the model into: the embedding, each block, and norm with head."""
        return self.layers + 2


SIZES = {
    "tiny": ModelSize(dim=64, layers=2, heads=4, hidden=192, seq=64, batch=4, lr=3e-3),
    "small": ModelSize(dim=256, layers=4, heads=8, hidden=704, seq=256, batch=4, lr=1e-3),
    "medium": ModelSize(dim=512, layers=8, heads=8, hidden=1408, seq=512, batch=8, lr=6e-4),
    "large": ModelSize(dim=2048, layers=16, heads=16, hidden=5632, seq=2048, batch=4, lr=3e-4),
}


@dataclass(frozen=True)
class TrainConfig:
    """The settings of one training run. Every rank has the same record.

    ``tp`` ranks share every layer, and ``pp`` such groups form a pipeline that shares the layers. The pipeline runs
    ``schedule``, which is the name of a generator or a CSV file, with ``microbatches`` in a step (0: a number that
    suits the batch). ``fsdp`` such pipelines train on equal parts of a batch, and each keeps a shard of the parameters.
    ``seq`` is the length of a training window in bytes, ``batch`` the number of windows in a step, ``lr`` the learning
    rate of AdamW after warm-up, and ``sample`` the number of bytes to generate at the end. ``compile`` trains the model
    written with DTensor, compiled with the pass. ``compare`` also trains a model without this package's overlap, or
    with ``fsdp`` several models. If ``text`` is None, the text is the English text of ``pydoc_data``.
    """

    size: str = "small"
    device: str = "cpu"
    fsdp: int = 1
    tp: int = 2
    pp: int = 1
    schedule: str | None = None
    microbatches: int = 0
    steps: int = 100
    seq: int = 256
    batch: int = 4
    lr: float = 1e-3
    dtype: str = "float32"
    seed: int = 0
    compare: bool = False
    compile: bool = False
    text: str | None = None
    timeline: str | None = None
    sample: int = 200
    prompt: str = "The "

    @property
    def model(self) -> ModelSize:
        return SIZES[self.size]

    @property
    def ranks(self) -> int:
        """The number of ranks in the run."""
        return self.fsdp * self.tp * self.pp

    @property
    def share(self) -> int:
        """The number of windows of a step that one data-parallel rank trains on."""
        return self.batch // self.fsdp

    @property
    def warmup(self) -> int:
        """The number of steps over which the learning rate rises linearly."""
        return min(20, max(1, self.steps // 5))


@dataclass(frozen=True)
class LaunchEnvironment:
    """Where the command runs: the number of visible GPUs, whether ranks may share one, and the ranks of torchrun."""

    gpus: int = 0
    share_gpus: bool = False
    started: int | None = None  # ranks that torchrun has started on all hosts; None: the command starts its own ranks
    started_here: int | None = None  # ranks that torchrun has started on this host

    def room(self, ranks: int) -> bool:
        """True if the GPUs of this host can serve ``ranks`` ranks."""
        return self.gpus >= ranks or (self.gpus > 0 and self.share_gpus)


def problem(config: TrainConfig, where: LaunchEnvironment) -> str | None:
    """Return one line that describes the first problem of ``config`` in this environment, or None."""
    for name in ("fsdp", "tp", "pp", "steps", "seq", "batch"):
        if getattr(config, name) < 1:
            return f"--{name} is {getattr(config, name)}; it must be at least 1"
    if not -(2**63) <= config.seed < 2**63:
        return f"--seed is {config.seed}; it must fit 64 bits"
    if config.sample < 0:
        return f"--sample is {config.sample}; it must be 0 (no sample) or more"
    if not (math.isfinite(config.lr) and config.lr > 0):
        return f"--lr is {config.lr}; it must be a positive number"
    if config.sample and not config.prompt:
        return "--prompt is empty; give at least one character to continue from, or --sample 0"
    model = config.model
    for what, number in (("heads", model.heads), ("SwiGLU columns", model.hidden)):
        if number % config.tp:
            return (
                f"--tp {config.tp} does not divide the {number} {what} of --size {config.size}; "
                f"allowed: {', '.join(map(str, allowed_tp(model)))}"
            )
    if config.seq % config.tp:
        return f"--seq {config.seq} is not a multiple of --tp {config.tp}; ranks must hold equal parts of the sequence"
    if config.batch % config.fsdp:
        return f"--batch {config.batch} is not a multiple of --fsdp {config.fsdp}; ranks must get equal parts of it"
    if config.batch * config.seq >= MOST_BYTES:
        return f"--batch {config.batch} times --seq {config.seq} is too large; a step must have less than 2 GiB of text"
    if config.compile and config.fsdp > 1:
        return f"--compile and --fsdp {config.fsdp}: a compiled model cannot be sharded yet; leave one of them out"
    if (found := _ranks_problem(config, where)) is not None:
        return found
    for option, path in (("--text", config.text), ("--timeline", config.timeline)):
        if (found := _path_problem(option, path)) is not None:
            return found
    for option, path in (("--text", config.text), ("--schedule", config.schedule)):
        if path is not None and config.timeline is not None and Path(path).resolve() == Path(config.timeline).resolve():
            return f"{option} and --timeline are the same file, {path}, which the timeline would overwrite"
    return None


def _ranks_problem(config: TrainConfig, where: LaunchEnvironment) -> str | None:
    """Return one line that says why the ranks of ``config`` cannot run here, or None."""
    if where.started is not None and config.ranks != where.started:
        given = [f"--{name} {getattr(config, name)}" for name in ("fsdp", "tp", "pp") if getattr(config, name) > 1]
        given = given or [f"--tp {config.tp}"]
        product = f" are {config.ranks} ranks" if len(given) > 1 else ""
        return (
            f"{' '.join(given)}{product}, but torchrun started {where.started} ranks; leave out --tp, or start as many "
            "ranks as the options need"
        )
    if config.device == "cuda" and where.gpus == 0:
        return "--device cuda: no GPU is visible to torch; use --device cpu, or see `symm-overlap info` for the reason"
    ranks_here = where.started_here or config.ranks
    if config.device == "cuda" and not where.room(ranks_here):
        return (
            f"{ranks_here} ranks on this host need {ranks_here} GPUs and {where.gpus} are visible; use fewer ranks, or "
            "set TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 to let ranks share a GPU"
        )
    return None


def allowed_tp(model: ModelSize) -> list[int]:
    """Return the values of ``--tp`` that divide a model of this size evenly."""
    return [tp for tp in range(1, model.heads + 1) if model.heads % tp == 0 and model.hidden % tp == 0]


def _path_problem(option: str, path: str | None) -> str | None:
    if path is None:
        return None
    if option == "--text":
        found = _unreadable(Path(path))
        return found and f"--text {path}: {found}"
    if Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
        return f"--timeline {path}: not a file in an existing folder; give a file name whose folder exists"
    if not os.access(path if Path(path).exists() else Path(path).absolute().parent, os.W_OK):
        return f"--timeline {path}: no permission to write there"
    if path.encode(errors="replace") != path.encode(errors="surrogateescape"):
        return f"--timeline {path}: torch's profiler writes no file whose name is not UTF-8; give another name"
    return None


def _unreadable(path: Path) -> str | None:
    """Return the reason why the bytes of ``path`` cannot be read, or None."""
    try:
        if path.is_dir():
            return "is a folder; give a file"
        if path.exists() and not path.is_file():
            return "is not a regular file; every rank reads it, which does not work for a pipe or a device"
        with path.open("rb") as file:
            file.read(1)
    except FileNotFoundError:
        return "no such file"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None
