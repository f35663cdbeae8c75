"""The base of all patterns, and functions that they share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ...collective.choosing.choice import Choice
from ...collective.dispatch.registration import size_of_group
from ...collective.problem import problem
from .._torch import GuardOnDataDependentSymNode
from ..arrangement import Arrangement, Size
from ..choices import Choices
from ..graph import may_view, step_of, writes
from ..groups import choice_in
from ..writer import SymbolicSizeError, Writer
from .casts import is_cast

c10d = torch.ops._c10d_functional


class SkipError(Exception):
    """Raised for a collective that stays as it is. The text says why."""


class Pattern(Protocol):
    """One collective in a graph, with the matmuls that feed or follow it.

    Attributes:
        target: the op of the collective.
        candidate: whether such matmuls have been found so far.
        path: the path that the chooser would choose, set once the collective is replaced.
        moved: bytes that one rank sends, for the new op or the old collective; see `symm_overlap.inductor.moved`.
    """

    target: Any
    candidate: bool
    path: str
    moved: int | None

    def __init__(self, graph: Graph, node: Node, choices: Choices) -> None: ...

    def fuse(self) -> int:
        """Replace the collective, and return how many matmuls it was fused with.

        Raises:
            SkipError: it cannot be replaced. The graph is then unchanged.
        """


@contextmanager
def writing(graph: Graph, before: Node) -> Iterator[Writer]:
    """Return a writer that adds nodes before a given node. If a node cannot be added, or an op rejects its arguments,
    the graph is restored, and SkipError says why.
    """
    write = Writer(graph, before)
    try:
        yield write
    except SkipError:
        write.undo()
        raise
    except SymbolicSizeError as error:
        write.undo()
        raise SkipError(f"sizes are symbolic: {error}") from None
    except GuardOnDataDependentSymNode as error:
        write.undo()
        raise SkipError(f"sizes are known only when the graph runs: {error.cond}") from None
    except (TypeError, ValueError) as error:
        write.undo()
        raise SkipError(f"the op rejects it: {error}") from None


def choice_of(
    choices: Choices,
    op: str,
    m: Size,
    n: Size,
    k: Size,
    like: Tensor,
    group: str,
    *,
    last_dim: bool = False,
    one_matmul: bool = True,
    dtype: torch.dtype | None = None,
) -> Choice | None:
    """Return what the chooser would choose, see `choice_in`; None if sizes are not known yet.

    The other arguments are those of `problem`.

    Args:
        like: has the device and the dtype of the factors.
        dtype: the dtype of what travels, if it is another one.

    Raises:
        SkipError: the choice that the user has forced is not possible.
    """
    if not all(isinstance(size, int) for size in (m, n, k)):
        return None
    world = size_of_group(group)
    how = {"factors": like.dtype, "last_dim": last_dim, "one_matmul": one_matmul}
    described = problem(op, m, n, k, dtype or like.dtype, world, like.device.type, **how)
    try:
        return choice_in(group, described, choices.settings, like.device)
    except ValueError as error:
        raise SkipError(str(error)) from None


def path_of(choices: Choices, choice: Choice | None) -> str:
    """Return the path of a choice; "" if there is none yet.

    Raises:
        SkipError: the op would use a collective of torch.distributed and one matmul, which the graph already has.
    """
    free = choices.settings.forced_path is None and not choices.small
    if choice is not None and free and choice.exchange == "c10d" and choice.whole:
        raise SkipError(f"small: {choice.reason}")
    return "" if choice is None else choice.path


def results(collective: Node) -> list[Node]:
    """Return the nodes whose value is the result of a collective.

    These are the waits for it, and the collective itself: it may be an output of the graph, for which a backward graph
    waits later.

    Raises:
        SkipError: anything else uses the collective without a wait.
    """
    waits = [user for user in collective.users if user.target is c10d.wait_tensor.default]
    others = [user for user in collective.users if user not in waits]
    if not collective.users:
        raise SkipError("its result is not used")
    if not waits or any(user.op != "output" for user in others):
        raise SkipError("its result is used without a wait")
    return [*waits, collective]


def give_way(graph: Graph, old: Iterable[Node], new: Node) -> None:
    """Replace nodes by another node, and erase them."""
    for node in old:
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def arranged(start: Arrangement, path: Iterable[Node]) -> Arrangement:
    """Return the arrangement of the last node of a path. Each node of the path rearranges or casts the previous one."""
    arrangement = start
    for node in path:
        if is_cast(node):
            continue
        step = step_of(node)
        found = None if step is None else step.arrange(arrangement)
        if found is None:
            raise SkipError("the product is rearranged in a way that the pass cannot follow")
        arrangement = found
    return arrangement


def require_unwritten(nodes: Iterable[Node]) -> None:
    """Raise SkipError if an operation in the graph writes into the memory of one of these tensors. What is written
    into inputs at the very end of the graph does no harm.
    """
    seen: set[Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            if writes(user, node) and not _at_the_end(user):
                raise SkipError(f"{user.target} writes into a tensor that the fused op would use")
        left += [each for each in node.all_input_nodes if may_view(node, each)]
        left += [user for user in node.users if may_view(user, node)]


def is_unwritten(nodes: Iterable[Node]) -> bool:
    """False if `require_unwritten` raises."""
    try:
        require_unwritten(nodes)
    except SkipError:
        return False
    return True


def _at_the_end(node: Node) -> bool:
    """True if this node and all later ones only write into inputs of the graph.

    torch.compile puts there what a program writes into its inputs, such as parameters and buffers. A fused op comes
    before: it depends on nodes that come before, and is written where the last of them was.
    """
    while node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":  # type: ignore[union-attr]
        node = node.next
    return node.op == "output"


def positions(graph: Graph) -> dict[Node, int]:
    """Return the position of every node in the graph."""
    return {node: number for number, node in enumerate(graph.nodes)}


def draws_between(position: dict[Node, int], first: Node, last: Node) -> bool:
    """True if a node between two others draws random numbers from torch's generator.

    If a matmul moves behind such a node, so does what depends on the matmul, which may draw too: in another order then.
    """
    return any(_draws(node) for node, number in position.items() if position[first] < number < position[last])


def _draws(node: Node) -> bool:
    """True for an operator that draws, and for one of higher order that calls such an operator, or a graph with one.

    In a checkpoint, torch replaces the former by the latter, which keeps the state of the generator.
    """
    arguments = [argument for argument in node.args if not isinstance(argument, Node)]
    if any(torch.Tag.nondeterministic_seeded in getattr(each, "tags", ()) for each in (node.target, *arguments)):
        return True
    graphs = (_graph_of(argument) for argument in node.all_input_nodes if argument.op == "get_attr")
    return any(any(map(_draws, graph.nodes)) for graph in graphs if graph is not None)


def _graph_of(node: Node) -> Graph | None:
    """Return the graph that is an attribute of the module of another graph; None if it is something else."""
    try:
        found = attrgetter(str(node.target))(node.graph.owning_module)
    except AttributeError:  # the pass of a user may have added a node without an attribute
        return None
    return found.graph if isinstance(found, GraphModule) else None


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """Return these nodes and all nodes that they depend on."""
    found: set[Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found
