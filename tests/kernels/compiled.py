"""Compile a fused kernel for a GPU, which this machine need not have, and read what the compilers report about it."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from symm_overlap.kernels.configuration import MOST_WEIGHTS, Configuration
from symm_overlap.kernels.launch import compiler_options, constants

NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Attributes:
        registers, spilled_bytes: per thread.
        shared_bytes: per program.
        ptx: the text that was passed to the assembler.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    ptx: str


class Variant(NamedTuple):
    """What a kernel is compiled for, besides its tiles.

    Attributes:
        dtype: the dtype of the factors.
        aligned: whether sizes and strides are multiples of 16.
        transposed: whether the columns of the weights are contiguous.
        count: the number of weights of one launch.
        scaled, biased, rescaled: what is done to the products. Products of float8 factors are bfloat16, or the same
            float8 dtype if rescaled.
        fast: see `symm_overlap.kernels.factor.Factor`.
    """

    dtype: torch.dtype
    aligned: bool = True
    transposed: bool = False
    count: int = 1
    scaled: bool = False
    biased: bool = False
    rescaled: bool = False
    fast: bool = False


def compiled(kernel: Any, architecture: int, configuration: Configuration, variant: Variant) -> Compiled:
    """Compile as a launch would, for operands with contiguous rows."""
    types = types_of(kernel, configuration, variant)
    lead = "weight_n" if variant.transposed else "weight_k"
    sixteenths = {name for name, each in types.items() if "*" in str(each)}
    if variant.aligned:
        sixteenths |= {"n", "ns", "k", "a_m", lead, f"{lead}s"} & set(types)
    signature, constexprs, attributes = {}, {}, {}
    for number, (name, each) in enumerate(types.items()):
        if name.isupper() or not isinstance(each, (str, tuple)):
            signature[name], constexprs[number,] = "constexpr", each
            continue
        if isinstance(each, tuple):
            signature[name] = tuple(one if isinstance(one, str) else "constexpr" for one in each)
            places = {(number, at): one for at, one in enumerate(each)}
        else:
            signature[name], places = each, {(number,): each}
        constexprs |= {place: one for place, one in places.items() if not isinstance(one, str)}
        if name in sixteenths:
            attributes |= {place: [["tt.divisibility", 16]] for place in places if place not in constexprs}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return _read(source, architecture, compiler_options(configuration))


def types_of(kernel: Any, configuration: Configuration, variant: Variant) -> dict[str, Any]:
    """Return the type of each argument, or a tuple of types, or its value if that is known at compile time."""
    dtype, count, tile = NAMES[variant.dtype], variant.count, configuration
    wide = "*bf16" if variant.dtype.itemsize == 1 else f"*{dtype}"
    output = f"*{dtype}" if variant.rescaled else wide
    matrix = weight = f"*{dtype}"
    if tile.descriptors:
        sides = (tile.tile_n, tile.tile_k) if variant.transposed else (tile.tile_k, tile.tile_n)
        matrix = f"tensordesc<{dtype}[{tile.tile_m}, {tile.tile_k}]>"
        weight = f"tensordesc<{dtype}[{sides[0]}, {sides[1]}]>"
    k = tile.tile_k if variant.aligned else tile.tile_k + 8
    like = torch.empty(64, k, dtype=variant.dtype, device="meta").t() if variant.transposed else None
    like = torch.empty(k, 64, dtype=variant.dtype, device="meta") if like is None else like
    known = {
        **dict.fromkeys(("own", "gathered", "a"), matrix),
        **{f"weight{number}": weight if number < count else None for number in range(MOST_WEIGHTS)},
        "weight": weight,
        "product": output,
        "products": (output,) * count,
        **dict.fromkeys(("ns", "weight_ks", "weight_ns"), ("i32",) * count),
        # A launch turns arguments that are 1 into constants.
        "ns": ("i32" if variant.aligned else 1, *["i32"] * (count - 1)),
        **dict.fromkeys(("a_k", "weight_k" if variant.transposed else "weight_n"), 1),
        "row_scale": "*fp32" if variant.scaled else None,
        "row_step": 1 if variant.scaled else 0,
        "scales": ("*fp32",) * count if variant.scaled else None,
        "steps": ("i32",) * count if variant.scaled else None,
        "biases": (wide,) * count if variant.biased else None,
        "result_scales": ("*fp32",) * count if variant.rescaled else None,
        **dict.fromkeys(("flags", "counters", "status"), "*i32"),
        "limit": "i64",
        **constants(tile, like, interpreted=False),
        "COUNT": count,
        "SCALED": variant.scaled,
        "BIASED": variant.biased,
        "RESCALED": variant.rescaled,
        "FAST": variant.fast,
    }
    return {name: known.get(name, "i32") for name in kernel.arg_names}


def _read(source: ASTSource, architecture: int, options: dict[str, Any]) -> Compiled:
    # Triton's own run of the assembler reports all that is needed. A second run would take as long as the compilation.
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), redirect_stdout(StringIO()) as printed:
        triton.knobs.compilation.always_compile = True  # a kernel from the cache has no report
        triton.knobs.nvidia.dump_ptxas_log = True
        result = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    said = printed.getvalue()
    spilled, registers = re.search(r"(\d+) bytes spill stores", said), re.search(r"Used (\d+) registers", said)
    assert spilled, said
    assert registers, said
    return Compiled(int(registers[1]), int(spilled[1]), result.metadata.shared, result.asm["ptx"])


_INSTRUCTION = re.compile(
    r"\s*(?:@!?(?P<guard>%p\d+)\s+)?(?P<op>[a-z]\S*)\s+(?P<first>\{[^}]*\}|[^,;]*)(?P<others>[^;]*);"
)


def branches_on(source: str, ptx: str) -> list[str]:
    """Return the branches that depend on a special register, as far as values stay in registers.

    A value that one thread writes to shared memory is the same for all threads that read it.
    """
    depends, branches = {source}, []
    instructions = [found for line in ptx.splitlines() if (found := _INSTRUCTION.match(line))]
    while True:
        known, branches = len(depends), []
        for each in instructions:
            registers = set(re.findall(r"%\w+", each["others"])) | {each["guard"]}
            if depends.isdisjoint(registers):
                continue
            if each["op"].startswith("bra"):
                branches.append(each[0].strip())
            elif not each["op"].startswith("st."):
                depends |= set(re.findall(r"%\w+", each["first"]))
        if len(depends) == known:
            return branches
