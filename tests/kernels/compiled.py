"""Compile a fused kernel for a GPU that need not be here, and read what the compilers say about it."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from symm_overlap.kernels.configuration import Configuration
from symm_overlap.kernels.launch import constants

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
POINTERS = {"flags": "*i32", "counters": "*i32", "status": "*i32"}
DATA = ("own", "gathered", "a", "weight", "product")


@dataclass(frozen=True)
class Compiled:
    """What became of a kernel.

    Attributes:
        registers, spilled_bytes: of a thread.
        shared_bytes: of a program.
        ptx: the text that the assembler was given.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    ptx: str


def signature(
    kernel: Any, configuration: Configuration, dtype: torch.dtype, constexprs: dict[str, Any]
) -> dict[str, str]:
    """The types of a kernel's arguments."""
    tiles = {
        "own": (configuration.tile_m, configuration.tile_k),
        "weight": (configuration.tile_k, configuration.tile_n),
    }
    tiles |= {"gathered": tiles["own"], "a": tiles["own"]}
    if constexprs["TRANSPOSED"]:
        tiles["weight"] = tiles["weight"][::-1]

    def type_of(name: str) -> str:
        if name in constexprs:
            return "constexpr"
        if configuration.descriptors and name in tiles:
            return f"tensordesc<{NAMES[dtype]}[{tiles[name][0]}, {tiles[name][1]}]>"
        return f"*{NAMES[dtype]}" if name in DATA else POINTERS.get(name, "i64" if name == "limit" else "i32")

    return {name: type_of(name) for name in kernel.arg_names}


def compiled(
    kernel: Any,
    architecture: int,
    dtype: torch.dtype,
    configuration: Configuration,
    *,
    aligned: bool,
    transposed: bool = False,
) -> Compiled:
    """Compile as a launch would, for operands with contiguous rows, of the weight or of its transpose.

    Args:
        aligned: sizes and strides are multiples of 16.
    """
    k = configuration.tile_k if aligned else configuration.tile_k + 8
    contiguous = {"a_k", "weight_k" if transposed else "weight_n"} & set(kernel.arg_names)
    constexprs = {
        **constants(configuration, dtype, k, interpreted=False),
        "TRANSPOSED": transposed,
        **dict.fromkeys(contiguous, 1),
    }
    sixteenths = {*DATA, *POINTERS}
    if aligned:
        sixteenths |= {"rows", "n", "k", "a_m", "weight_n" if transposed else "weight_k"}
    types = signature(kernel, configuration, dtype, constexprs)
    index = {name: number for number, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(index[name],): value for name, value in constexprs.items()},
        attrs={
            (index[name],): [["tt.divisibility", 16]]
            for name in sixteenths & set(types)
            if types[name] != "constexpr" and not types[name].startswith("tensordesc")
        },
    )
    return _read(source, architecture, {"num_warps": configuration.warps, "num_stages": configuration.stages})


def small(kernel: Any, architecture: int) -> Compiled:
    """Compile one of the kernels of `symm_overlap.kernels.stream_flags`."""
    types = {"flags": "*i32", "status": "*i32", "output": "*u8", "limit": "i64", "BLOCK": "constexpr"}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    constexprs = {(number,): 4096 for number, name in enumerate(kernel.arg_names) if name == "BLOCK"}
    options = {"num_warps": 4 if constexprs else 1}
    return _read(ASTSource(fn=kernel, signature=signature, constexprs=constexprs), architecture, options)


def _read(source: ASTSource, architecture: int, options: dict[str, int]) -> Compiled:
    result = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    assembler = tools / ("ptxas" if architecture < 100 else "ptxas-blackwell")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(result.asm["ptx"])
        file.flush()
        command = [assembler, "-v", f"--gpu-name=sm_{architecture}{'a' if architecture >= 90 else ''}", file.name]
        said = subprocess.run([*command, "-o", os.devnull], capture_output=True, text=True, check=True).stderr
    spilled, registers = re.search(r"(\d+) bytes spill stores", said), re.search(r"Used (\d+) registers", said)
    assert spilled, said
    assert registers, said
    return Compiled(int(registers[1]), int(spilled[1]), result.metadata.shared, result.asm["ptx"])
