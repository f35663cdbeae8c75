"""List the files of symm_overlap that one ``all_gather_matmul`` runs through, forward and backward, on two CPU ranks.

    python -m tests.docs.call_path                            # this version
    PYTHONPATH=../before python tests/docs/call_path.py       # another checkout, which must have been built

Rank 0 is watched with ``sys.setprofile``. Three calls are made before the watched one, to fill the caches. Each start
of a function (or resumption, if it is a generator) is an entry into the file that contains the function. Consecutive
entries into the same file count once. A *return* is an entry into a file that had been left before. There are two
lists:

``all``
    The entries of all functions of the package.
``tensor``
    The entries of functions that get the tensor of the call as an argument, as it is or as a view. In forward this is
    the shard, in backward the gradient of the product. A reader follows this path from the public function to the
    memory into which the tensor is written.

Each direction is counted separately, and then both as one sequence. Calls that repeat an earlier one leave out many of
these files, so the watched call takes the usual way.

The script imports only torch and symm_overlap, so that it works with any version.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_HAS_STAR_ARGUMENTS, _HAS_KEYWORDS = 4, 8  # inspect.CO_VARARGS, CO_VARKEYWORDS


def collapsed(files: Sequence[str]) -> list[str]:
    """Return the sequence without consecutive repetitions."""
    return [file for index, file in enumerate(files) if index == 0 or files[index - 1] != file]


def returns(files: Sequence[str]) -> int:
    """Return how many entries of a collapsed sequence are into a file that was left before."""
    return len(files) - len(set(files))


class Watch:
    """A context manager that records the files of the package that this thread enters.

    Args:
        package: the folder whose files count.
        tensor: the tensor whose path is followed; see the module's docstring.
    """

    def __init__(self, package: Path, tensor: torch.Tensor) -> None:
        self._package, self._memory = f"{package}{os.sep}", tensor.untyped_storage().data_ptr()
        self._all: list[str] = []
        self._tensor: list[str] = []

    def __enter__(self) -> Watch:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # Skip comprehensions and lambdas, whose names are in angle brackets. Whether a comprehension is a function
        # depends on the Python version.
        if event != "call" or not code.co_filename.startswith(self._package) or code.co_name.startswith("<"):
            return
        file = code.co_filename.removeprefix(self._package)
        self._all.append(file)
        if any(self._holds(frame.f_locals.get(name)) for name in _arguments(code)):
            self._tensor.append(file)

    def _holds(self, value: object, depth: int = 0) -> bool:
        if isinstance(value, torch.Tensor):
            return value.untyped_storage().data_ptr() == self._memory
        return isinstance(value, (list, tuple)) and depth < 3 and any(self._holds(item, depth + 1) for item in value)

    def found(self) -> dict[str, list[str]]:
        """Return ``{"all": files, "tensor": files}``, collapsed."""
        return {"all": collapsed(self._all), "tensor": collapsed(self._tensor)}


def _arguments(code: CodeType) -> tuple[str, ...]:
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & _HAS_STAR_ARGUMENTS) + bool(code.co_flags & _HAS_KEYWORDS)
    return code.co_varnames[:count]


def watch_call(rank: int, group: dist.ProcessGroup) -> dict[str, dict[str, list[str]]]:
    """Watch one call. Return ``{direction: {"all": files, "tensor": files}}`` on rank 0. Every rank must call this."""
    import symm_overlap

    torch.manual_seed(rank)
    shard, weight = torch.randn(512, 64, requires_grad=True), torch.randn(64, 32, requires_grad=True)
    gradient = torch.ones(2 * 512, 32)

    def forward() -> torch.Tensor:
        product: torch.Tensor = symm_overlap.all_gather_matmul(shard, [weight], 0, group)[1][0]
        return product

    with suppress(ImportError):  # an older version
        from symm_overlap.collective.exchange import Repeatable

        def usually(op: Repeatable, peers: Any, args: Any, kwargs: Any, *key: Any) -> Any:
            return op.eager(peers, *args, **kwargs)

        Repeatable.call = usually  # type: ignore[method-assign]
    for _ in range(3):
        forward().backward(gradient)
    if rank != 0:
        forward().backward(gradient)
        return {}
    package = Path(symm_overlap.__file__).parent
    with Watch(package, shard) as ahead:
        product = forward()
    with Watch(package, gradient) as back:
        product.backward(gradient)
    return {"forward": ahead.found(), "backward": back.found()}


def _run(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    if found := watch_call(rank, dist.group.WORLD):
        show(found)
    dist.barrier()
    dist.destroy_process_group()


def show(found: dict[str, Any]) -> None:
    """Print what `watch_call` found."""
    for which in ("all", "tensor"):
        both = collapsed([file for lists in found.values() for file in lists[which]])
        for direction, files in [*((name, lists[which]) for name, lists in found.items()), ("in one", both)]:
            print(f"{which}, {direction}: {len(set(files))} files, {returns(files)} returns")
    for direction, lists in found.items():
        print(f"\nthe tensor's path, {direction} (* a return):")
        print("\n".join(path_lines(lists["tensor"])))


def path_lines(files: Sequence[str]) -> list[str]:
    """Return a line for each entry. A star means that the file had been left before."""
    return [f"  {'*' if file in files[:at] else ' '} {file}" for at, file in enumerate(files)]


def main() -> int:
    """Print the path of one call."""
    # With this store, no rank has to find a free port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(_run, (store.port,), 2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
