"""The private torch APIs that this project uses, except those that only one package with a `_torch` of its own uses.

Checked on torch 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import Context
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.compiler.config
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _SymmetricMemory as SymmetricMemory
from torch._guards import TracingContext
from torch._library.autograd import Info as AutogradInfo
from torch._library.autograd import make_autograd_impl
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d as _c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = [
    "SHAPES_OF_SYMM_MEM",
    "StoreGoneError",
    "SymmetricMemory",
    "TorchDispatchMode",
    "add_to_cache_keys",
    "all_gather_single",
    "below_autocast",
    "below_autograd",
    "compiling",
    "context_of_backward",
    "device_types_of",
    "differentiable",
    "gloo_group",
    "group_store",
    "has_context",
    "has_no_data",
    "has_tangent",
    "in_forward_mode",
    "is_fake",
    "own_part",
    "ranks_are_threads",
    "redispatch",
    "reduce_scatter_single",
    "reparametrized",
    "resolve_group",
    "saved_tensors_hooks",
    "scalar_types_to_dtypes",
    "scaled_mm",
    "symm_mem",
    "tensors_with_data",
    "tensors_without_data",
    "transforms_active",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "untracked_views",
]

scaled_mm = torch._scaled_mm

# This rank's part of a DTensor, without a node in the graph of autograd.
own_part: Callable[[Any], torch.Tensor] = attrgetter("_local_tensor")

# ``with reparametrized(module, {name: tensor}):`` replaces attributes of a module until the block ends. The compiler
# knows that it restores them, so it accepts the block in an activation checkpoint, where it rejects any other write.
reparametrized = torch.nn.utils.stateless._reparametrize_module


def compiling() -> bool:
    """True while this thread traces. `torch.compiler.is_compiling` is true in all threads while one of them traces."""
    return torch.compiler.is_compiling() and (
        torch.compiler.is_dynamo_compiling()  # Dynamo takes it for true, and does not look at what follows
        or torch._C._len_torch_dispatch_stack() > 0
        or TracingContext.try_get() is not None
    )


# The functions that compute the output shapes of torch's own fused ops.
SHAPES_OF_SYMM_MEM: dict[str, Callable[..., Any]] = {
    "fused_all_gather_matmul": symm_mem._fused_all_gather_matmul_fallback,
    "fused_matmul_reduce_scatter": symm_mem._fused_matmul_reduce_scatter_fallback,
    "fused_all_gather_scaled_matmul": symm_mem._fused_all_gather_scaled_matmul_fallback,
    "fused_scaled_matmul_reduce_scatter": symm_mem._fused_scaled_matmul_reduce_scatter_fallback,
}


def resolve_group(name: str) -> dist.ProcessGroup:
    """Return the process group of this name. Raises ValueError if there is none."""
    try:
        return _c10d._resolve_process_group(_c10d.GroupName(name))  # type: ignore[attr-defined]
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"no process group is named {name!r}: pass group.group_name of a group that this process is in"
        ) from error


def is_fake(group: dist.ProcessGroup) -> bool:
    """True if the group has no real peers: it was made by ``init_process_group("fake")``, for work on graphs."""
    entry = _c10d._world.pg_map.get(group)
    return entry is not None and entry[0] == "fake"


def context_of_backward() -> Context | None:
    """Return the context of ``backward()``'s caller, on any thread that runs it. None elsewhere, and in torch 2.11."""
    if not torch._C._is_key_in_tls("context"):
        return None
    context: Context | None = torch._C._get_obj_in_tls("context")
    return context


def scalar_types_to_dtypes(types: Sequence[torch.dtype | int | None]) -> list[torch.dtype | None]:
    """Return a list of dtypes as it was before the dispatcher converted its dtypes to numbers."""
    known = [_FLOAT8.get(each, each) for each in types]
    others: list[torch.dtype | None] = symm_mem._maybe_convert_scalar_types_to_dtypes(
        [None if isinstance(each, torch.dtype) else each for each in known]
    )
    return [each if isinstance(each, torch.dtype) else other for each, other in zip(known, others, strict=True)]


# The numbers of c10::ScalarType that torch's own function does not know.
_FLOAT8: dict[Any, torch.dtype] = {23: torch.float8_e5m2, 24: torch.float8_e4m3fn}


def group_store(group: dist.ProcessGroup) -> _c10d.Store:
    """Return the key-value store that the ranks of a group share."""
    return _c10d._get_process_group_store(group)


def ranks_are_threads(group: dist.ProcessGroup) -> bool:
    """True if the ranks are threads of one process, as in torch's tests. Other processes cannot reach their store."""
    store = group_store(group)
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return isinstance(store, dist.HashStore)  # type: ignore[attr-defined]


class StoreGoneError(dist.DistBackendError):
    """The group's store cannot be reached: the rank that hosts it has ended."""

    def __init__(self, group_name: str, error: BaseException) -> None:
        reason = str(error).splitlines()[0]
        super().__init__(
            f"symm_overlap: the store of group {group_name!r} is gone ({reason}): the process that hosts it, usually "
            "rank 0, has ended. Its own output says why; this group cannot go on."
        )


def gloo_group(group: dist.ProcessGroup, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """Create another group of the ranks of ``group``, on gloo. Collective among calls with this name, in any thread.

    ``torch.distributed.new_group`` is not used, because every rank of the world has to call it, in one order.
    """
    # gloo waits in the store. With a connection of its own, it does not make the groups of other threads wait.
    store = _c10d.PrefixStore(name, group_store(group).clone())  # type: ignore[attr-defined]
    made = dist.ProcessGroup(store, group.rank(), group.size())
    backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
    made._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    made._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return made


def device_types_of(group: dist.ProcessGroup) -> set[str]:
    """Return the types of devices whose tensors the group can send."""
    return {device.type for device in group._device_types}


# Public, but torch 2.13 renamed both and warns of the names that torch 2.11 has.
all_gather_single: Callable[..., dist.Work | None]
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., dist.Work | None]
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# Every call uses these. They are torch's own callables: a Python function around them would double their time.
untracked_views: Callable[[], AbstractContextManager[None]] = partial(
    torch._C._ExcludeDispatchKeyGuard, torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
)
"""Inside it views are not tracked for autograd: callers of an op may modify the views that it returns in place."""

transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a transform of torch.func is active."""

below_autograd: Callable[[], AbstractContextManager[None]] = torch._C._AutoDispatchBelowAutograd
"""Inside it ops skip the autograd layer."""


def redispatch(op: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``op`` again, below its autograd kernel."""
    return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)


def differentiable(op: Any, setup_context: Callable[..., None], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the autograd kernel that `torch.library.register_autograd` creates for ``op``. It takes a keyset first."""
    made: Callable[..., Any] = make_autograd_impl(op, AutogradInfo(backward, setup_context))
    return made


def in_forward_mode() -> bool:
    """True if forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


def has_tangent(tensor: torch.Tensor) -> bool:
    """True if ``tensor`` has a tangent, in forward-mode differentiation."""
    return forward_ad.unpack_dual(tensor).tangent is not None


_in_cache_keys: dict[str, int] = {}


def add_to_cache_keys(group_name: str, world: int) -> None:
    """Make the size of a group part of the keys of all graphs that torch.compile caches from now on in this process.

    If a group is created again under its old name, its new size replaces the old size in the keys.
    """
    if _in_cache_keys.get(group_name) == world:
        return
    config = torch.compiler.config
    before = config.cache_key_tag.partition(_TAG)[0]
    known = {**_in_cache_keys, group_name: world}
    sizes = (f"group {name} of {size} ranks" for name, size in sorted(known.items()))
    config.cache_key_tag = before + _TAG + ", ".join(sizes) + "]"
    _in_cache_keys[group_name] = world


_TAG = " [symm_overlap, in order: "  # excludes graphs compiled before Inductor kept the ops in order


def below_autocast() -> AbstractContextManager[None]:
    """Return a context inside which ops skip the autocast layer, whatever its settings are."""
    guard: AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)
    return guard


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def tensors_without_data() -> AbstractContextManager[Any]:
    """Return a context inside which new tensors have everything except data. Tensors from outside stay as they are."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # imported late: few programs need it

    return FakeTensorMode(allow_non_fake_inputs=True)


def lacking_data(values: Any) -> Any:
    """Return ``values``, nested in any way, with its plain tensors replaced by tensors without data.

    It must be called inside `tensors_without_data`. Tensors that wrap other tensors, such as a DTensor, stay.
    """
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode()
    assert mode is not None
    plain = (torch.Tensor, torch.nn.Parameter)
    return tree_map_only(plain, lambda each: mode.from_tensor(each) if type(each) in plain else each, values)


def tensors_with_data() -> AbstractContextManager[Any]:
    """Return a context inside which tensors have data again, also inside `tensors_without_data`."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily  # as above

    return unset_fake_temporarily()


def has_no_data(tensor: torch.Tensor | None) -> bool:
    """True if ``tensor``, or a tensor that it wraps, was made inside `tensors_without_data`."""
    from torch._subclasses.fake_tensor import is_fake as made_there

    return tensor is not None and made_there(tensor)


def has_context(index: int) -> bool:
    """True if this process has a CUDA context (hundreds of MB) on GPU ``index``. The query itself creates none."""
    found: bool = torch._C._cuda_hasPrimaryContext(index)  # type: ignore[attr-defined]
    return found


def saved_tensors_hooks() -> Any:
    """Return the innermost active hooks for tensors that autograd saves, such as the hooks of a checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)
