"""Types of the C++ extension; see csrc/module.cpp and csrc/cuda/bindings.cpp."""

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor

with_cuda: bool
large_output_bytes: int
max_partials: int  # with CUDA only

def argument_key(arguments: Sequence[Any], /) -> bytes:
    """Return equal bytes for arguments that are alike. See csrc/cpu/arguments.h."""

def call_key(arguments: Sequence[Any], /) -> bytes:
    """Return equal bytes for calls that can be carried out in the same way. See csrc/cpu/arguments.h."""

def kernel_key(arguments: Sequence[Any], /) -> bytes | None:
    """Return the call key if torch would only call the op's kernel, else None. See csrc/cpu/arguments.h."""

def layout_key(tensors: Sequence[Tensor | None], /) -> bytes:
    """Return equal bytes for lists with the same dtypes, sizes, strides and alignments. See csrc/cpu/arguments.h."""

def profiled() -> bool:
    """True if a profiler records this thread."""

def shm_dir() -> str: ...

timeout_variable: ContextVar[int]
"""The deadline of waits in C++, in milliseconds; 0 if it is not set. See csrc/cpu/deadline.h."""

def process_timeout_ms() -> int: ...
def timeout_ms_or_default(argument: int, /) -> int: ...
def counting_writes_to(local: Tensor, whole: Tensor, /) -> Tensor:
    """Return ``local`` with the version of ``whole``. See csrc/cpu/counted.h."""

def new_output(like: Tensor, shape: Sequence[int], /) -> Tensor: ...
def kept_output_bytes() -> int: ...
def release_kept_outputs() -> None: ...
def copy(target: Tensor, source: Tensor, /) -> None: ...
def multiply(a: Tensor, b: Tensor, out: Tensor, add: bool = False, bias: Tensor | None = None) -> None: ...
def multiply_by_torch(a: Tensor, b: Tensor, out: Tensor, add: bool = False, bias: Tensor | None = None) -> None: ...
def multiply_scaled(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    result_scale: Tensor | None,
    fast: bool,
    in_float32: bool,
    out: Tensor,
    /,
) -> None:
    """See csrc/issue/compute.h."""

def onednn_is_quicker() -> bool: ...
def prefer_onednn(yes: bool | None, /) -> None: ...
def reduce(partials: Sequence[Tensor], out: Tensor, average: bool, /) -> None: ...

class Operand:
    """An operand of a step. See csrc/issue/program.h. The tensors of a call are identified by their index."""

    @staticmethod
    def fixed(tensor: Tensor, /) -> Operand: ...
    @staticmethod
    def whole(tensor: int, /) -> Operand: ...
    @staticmethod
    def slice(tensor: int, dim: int, start: int, length: int, /) -> Operand: ...
    @staticmethod
    def part(tensor: int, sizes: Sequence[int], strides: Sequence[int], offset: int, /) -> Operand: ...

class Flags:
    """The flags of a call. See csrc/issue/flags.h."""

    def up(self, chunk: int, /) -> None:
        """Raise the flag of a chunk on the current stream. `NoFlags` cannot."""

    def wait(self, chunk: int, /) -> None:
        """Let the current stream wait until the flag of a chunk is up. `NoFlags` cannot."""

class NoFlags(Flags):
    """Flags for the driver that only records operations."""

    def __init__(self) -> None: ...

class CudaFlags(Flags):
    """Flags on a GPU. See csrc/cuda/flags.h."""

    def __init__(self, status: Tensor, record: Tensor, in_memory: bool) -> None: ...
    def use(self, words: Tensor) -> None: ...
    def begin(self, caller: int) -> None: ...
    def give_up(self) -> None: ...

class Kernel:
    """A compiled kernel and its parameters, which are appended one after another. See csrc/issue/kernel.h."""

    def __init__(self, function: int, programs: int, threads: int, shared_bytes: int, /) -> None: ...
    def address(self, tensor: int, /) -> None: ...
    def number(self, value: int, /) -> None: ...
    def matrix(
        self,
        tensor: int,
        element_type: int,
        swizzle: int,
        sizes: tuple[int, int],
        stride: int,
        box: tuple[int, int],
        /,
    ) -> None: ...

class Driver:
    """Carries out programs. See csrc/issue/driver.h."""

    def abandon(self) -> None:
        """Make the caller's stream current again, and let it follow the work that other streams have been given.

        To be called after an error, when nothing more is issued for this call.
        """

    has_fused_meetings: bool
    """Whether this driver can carry out `Program.meet_and_sum` and `Program.await_and_gather`."""

class LogDriver(Driver):
    """Carries out nothing, but records the operations. See csrc/issue/log.h."""

    def __init__(self) -> None: ...
    def poison(self, outputs: Sequence[Tensor], /) -> None: ...
    def take(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """Return the operations since the last call of this method, each with its stream and the numbers of it."""

class CpuDriver(Driver):
    def __init__(self, lane: CpuLane) -> None: ...

class Program:
    """Items of a plan that are issued without Python. See csrc/issue/program.h. Each item has its stream's number."""

    at: int
    """The item at which a failed `run` has stopped."""

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def signal(self, stream: int, peers: Sequence[int], channel: int, /) -> None: ...
    def wait(self, stream: int, peers: Sequence[int], channel: int, /) -> None: ...
    def barrier(self, stream: int, channel: int, /) -> None: ...
    def sleep(self, stream: int, /) -> None: ...
    def record(self, stream: int, event: int, /) -> None: ...
    def follow(self, stream: int, event: int, /) -> None: ...
    def enter(self, stream: int, /) -> None: ...
    def pace(self, stream: int, ns: int, /) -> None: ...
    def copy(
        self, stream: int, to: tuple[int, int], source: tuple[int, int], rows: tuple[int, int, int, int], /
    ) -> None:
        """Append a copy.

        Args:
            to, source: (index of a tensor of the call, offset in bytes from its start), or (-1, address).
            rows: (number of rows, bytes of a row, bytes from one row to the next at the target, the same at the
                source).
        """

    def make(self, stream: int, tensor: int, like: Tensor, /) -> None:
        """Append the creation of a new tensor like ``like``. Later items of the run use it by its index ``tensor``."""

    def add(self, stream: int, out: Operand, addend: Operand, /) -> None: ...
    def multiply_scaled(
        self,
        stream: int,
        a: Operand,
        scale_a: Operand,
        b: Operand,
        scale_b: Operand,
        bias: Operand | None,
        result_scale: Operand | None,
        fast: bool,
        in_float32: bool,
        out: Operand,
        /,
    ) -> None: ...
    def copy_tensor(self, stream: int, to: Operand, source: Operand, /) -> None: ...
    def multiply(
        self, stream: int, a: Operand, b: Operand, out: Operand, add: bool, bias: Operand | None, /
    ) -> None: ...
    def sum(
        self, stream: int, partials: Sequence[Operand], average: bool, out: Operand, copy: Operand | None, /
    ) -> None: ...
    def meet_and_sum(
        self,
        stream: int,
        channel: int,
        partials: Sequence[Operand],
        average: bool,
        out: Operand,
        copy: Operand | None,
        done_channel: int | None,
        received: int,
        /,
    ) -> None:
        """Append a signal to all peers, a wait for them, a sum, and a signal to all on ``done_channel`` if given.

        Args:
            received: the number of bytes that the sum reads from peers.
        """

    def await_and_gather(
        self, stream: int, channel: int, sources: Sequence[int], part_bytes: int, out: Operand, received: int, /
    ) -> None:
        """Append a wait for all peers, and a copy of each peer's part to its place in ``out``.

        Args:
            sources: the address of each rank's part, by rank. This rank's own part is not copied.
            part_bytes: the bytes of each part. The last parts may be shorter or empty.
            received: the number of bytes that are copied.
        """

    def raise_flag(self, stream: int, flags: Flags, chunk: int, /) -> None: ...
    def await_flag(self, stream: int, flags: Flags, chunk: int, /) -> None: ...
    def launch(self, stream: int, kernel: Kernel, tensors: Sequence[Operand], /) -> None: ...
    def name(self, begin: int, step: str, /) -> None:
        """Name the items from ``begin`` on. While a profiler records, there is a range of this name around them."""

    def run(self, driver: Driver, tensors: Sequence[Tensor], begin: int, end: int, /) -> None:
        """Issue the items from ``begin`` up to, but not including, ``end``."""

class CpuLane:
    """One sequence of calls over a workspace that has had its rendezvous. See csrc/cpu/lane.h."""

    def __init__(self, workspace: Tensor, group_name: str) -> None: ...
    def begin(self, timeout_ms: int, call_hash: int = 0, number: int = 0) -> None:
        """Begin a call. To be called before the first step of the call.

        Args:
            timeout_ms: the limit for each wait of the call. 0: use the calling thread's setting, or the default.
            call_hash: a number from 0 to 2**64 - 1 that is the same on every rank that is in the same call. If it is 0,
                calls are not compared.
            number: the number of the call, from 0 on, one higher in each call. No rank may be two calls ahead of a rank
                that still waits.
        """

    def signal(self, peer: int, channel: int) -> None: ...
    def wait(self, peer: int, channel: int) -> None:
        """Wait for the next signal of ``peer`` on ``channel``.

        Raises DistBackendError if the deadline has passed, if the peer is gone, or if it is in a different call.
        """

    def barrier(self, channel: int) -> None: ...
    def give_up(self) -> None: ...
    def why_gone(self, peer: int) -> str: ...

def different_call(peer: str, theirs: int, ours: int) -> str: ...
def rendezvous_number(tensor: Tensor, group_name: str, /) -> int: ...
def rendezvous(tensor: Tensor, group_name: str, tag: str, /) -> None: ...
def refuse_rendezvous(group_name: str, tag: str, reason: str, /) -> None: ...
def exchange(group_name: str, purpose: str, mine: str, tag: str = "", /) -> list[str]: ...
def death_of(group_name: str, peer: int, /) -> str: ...
def __getattr__(name: str) -> Any: ...
