"""The pass over the graphs of torch.compile after autograd. It replaces collectives and matmuls by ops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from torch.fx import Graph, GraphModule

from ..collective.dispatch.note import make_note
from ._torch import (
    AnyPass,
    CustomGraphPass,
    ShortenTraceback,
    get_hash_for_files,
    is_inner_graph,
    run_after_compilations,
    stable_topological_sort,
)
from .cached import find_cached, keep
from .choices import Choices
from .graph import is_ours, is_written
from .groups import known_of_groups
from .patterns import (
    PATTERNS,
    Pattern,
    SkipError,
    add_first,
    bias_first,
    cast_first,
    drop_zeros,
    empty_buckets,
    make_plain,
    quantise_first,
    unbatch,
)
from .report import GraphReport, Site, place_of, record
from .writer import add_values


class NotFusedError(ShortenTraceback):  # torch would wrap any other error of a pass into one of its own
    """Raised with ``strict`` if a collective beside a matmul was not fused, or if a graph has none."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


class OverlapPass(CustomGraphPass):
    """The custom pass for Inductor.

    Args:
        choices: the user's choices.
        before: the user's own pass, which runs first.
        padding: whether Inductor padded matmuls before the pass was set.
    """

    def __init__(self, choices: Choices, before: AnyPass | None = None, padding: bool = True) -> None:
        self.choices, self.before, self.padding = choices, before, padding

    def __call__(self, graph: Graph) -> None:
        """Replace the collectives and matmuls of a graph that can be fused, and add the outcome to the report.

        Raises:
            NotFusedError: with ``strict``, if a candidate is skipped, or if the graph has neither a candidate nor an op
                of this package.
        """
        if self.before is not None:
            self.before(graph)
            add_values(graph)
        by_hand = is_inner_graph() or any(is_ours(node) for each in _with_inner(graph) for node in each.nodes)
        drop_zeros(graph)
        unbatch(graph)
        make_plain(graph, self.choices)
        empty_buckets(graph, self.choices)
        bias_first(graph)
        quantise_first(graph)
        cast_first(graph)
        if self.choices.merge_sums:
            add_first(graph, self.choices)
        report = GraphReport(tuple(site for pattern in PATTERNS for site in self._replace(graph, pattern)), by_hand)
        if any(is_written(node) for node in graph.nodes):
            stable_topological_sort(graph)
            graph.eliminate_dead_code()
            self._add_notes(graph)
            graph.lint()
        keep(report)
        record(report, warn=not self.choices.strict)
        if self.choices.strict and (report.skipped or report.complaint):
            raise NotFusedError(report.complaint or f"symm_overlap: not everything was fused in this graph:\n{report}")

    def uuid(self) -> object:
        """Return what the key of a cached graph depends on: this package, the choices, and what is known of the groups,
        because a graph may contain only their names. If the user's own pass has no key, return None, which keeps graphs
        out of the cache.
        """
        # These calls are here because torch calls this method for every graph, before it looks the graph up in a cache.
        find_cached()
        run_after_compilations(find_cached)
        before = None
        if self.before is not None:
            before = self.before.uuid() if isinstance(self.before, CustomGraphPass) else None
            if before is None:
                return None
        forced = self.choices.settings.forced_path
        return "symm_overlap", _version(), str(self.choices), forced, known_of_groups(), before

    def _replace(self, graph: Graph, pattern: type[Pattern]) -> Iterator[Site]:
        """Replace every collective of one kind that can be replaced."""
        for node in list(graph.nodes):
            if node.target is pattern.target:
                site = Site(str(node.target).split(".")[1], place_of(node))
                found = pattern(graph, node, self.choices)
                try:
                    site = replace(site, matmuls=found.fuse(), path=found.path)
                except SkipError as skipped:
                    site = replace(site, reason=str(skipped), candidate=found.candidate)
                yield replace(site, moved=found.moved)

    def _add_notes(self, graph: Graph) -> None:
        """Pass the settings to the ops that the pass has written."""
        for node in graph.nodes:
            if is_written(node):
                node.kwargs = {**node.kwargs, "note": make_note(self.choices.settings)}


def _with_inner(graph: Graph) -> Iterator[Graph]:
    """Yield a graph, and the graphs of the regions and branches in it."""
    yield graph
    for module in graph.owning_module.modules() if graph.owning_module is not None else ():
        if isinstance(module, GraphModule) and module.graph is not graph:
            yield module.graph


@cache
def _version() -> bytes:
    """Return a hash of this package's Python files, because another version may compile another graph."""
    files = sorted(str(file) for file in Path(__file__).parents[1].rglob("*.py"))
    return get_hash_for_files(tuple(files))
