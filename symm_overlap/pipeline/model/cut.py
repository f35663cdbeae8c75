"""Cut the graph of a traced model into the graphs of its stages.

Stage s runs the nodes from its first layer up to the first layer of stage s + 1. The first stage also runs what comes
before all layers, and the last stage what comes after them. A value that a later stage needs passes through the stages
between: each receives it and returns it. The order of these values does not depend on the order of the nodes, which may
differ between ranks (identities.py).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from .begins import Begins, at_layers
from .copies import Copies
from .identities import Identities
from .trace.calls import Call
from .trace.effects import has_effects
from .trace.error import TraceError
from .trace.tracer import Traced
from .trained import used_with_gradients

_DETACH = torch.ops.aten.detach.default


@dataclass(frozen=True)
class Part:
    """What one stage runs.

    Attributes:
        graph: its placeholders are first the tensors that the previous stage returns, then tensors of the batch by
            name.
        received: how many tensors come from the previous stage.
        inputs: the names of the tensors of the batch.
        calls: for each node that calls a whole module, the call.
        attributes: the names of parameters and buffers that it uses outside of whole modules.
        returned: a digest of what it returns, which is the same on all ranks that trace the same model.
    """

    graph: fx.Graph
    received: int
    inputs: tuple[str, ...]
    calls: dict[fx.Node, Call]
    attributes: tuple[str, ...]
    returned: str

    @property
    def buffers(self) -> set[str]:
        """The names of the buffers of its modules, and of its attributes."""
        calls = self.calls.values()
        inside = {f"{call.name}.{n}" for call in calls for n, _ in call.module.named_buffers(remove_duplicate=False)}
        return inside | set(self.attributes)

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the whole modules that the stage calls."""
        return tuple(dict.fromkeys(call.name for call in self.calls.values()))


def cut(
    traced: Traced, sizes: Sequence[int], outputs: Sequence[int] | None = None, begins: Begins | None = None
) -> list[Part]:
    """Return the parts of all stages.

    Args:
        sizes: how many calls of layers each stage has.
        outputs: the indices of the tensors, among those that the model returns, that the last stage returns; by default
            all.
        begins: where the stages begin; by default each at its first layer.

    Raises:
        TraceError: a value cannot pass between stages.
    """
    return _Cut(traced, len(sizes), at_layers(traced, sizes) if begins is None else begins, outputs).parts()


class _Cut:
    def __init__(self, traced: Traced, stages: int, begins: Begins, outputs: Sequence[int] | None) -> None:
        self._traced, self._stages = traced, stages
        self._identities = Identities(traced)
        self._copies = copies = Copies(traced)
        nodes = list(traced.graph.nodes)
        self._nodes = nodes[:-1]
        (returned,) = nodes[-1].args
        self._outputs = list(returned) if outputs is None else [returned[index] for index in outputs]
        self._stage_of: dict[fx.Node, int] = {}
        stage = 0
        for node in self._nodes:
            stage = begins.get(node, stage)
            if node not in copies.free and node.op != "get_attr":
                of_parts = node.target is operator.getitem and node.args[0] in self._stage_of
                self._stage_of[node] = self._stage_of[node.args[0]] if of_parts else stage
        copies.require_whole(self._stage_of)
        self._used = used_with_gradients(traced, self._outputs)
        self._needed, self._until = self._needs()

    def _needs(self) -> tuple[list[set[fx.Node]], dict[fx.Node, int]]:
        """Return for each stage the nodes that it runs, and for each of these nodes the last stage that needs it."""
        needed: list[set[fx.Node]] = [set() for _ in range(self._stages)]
        until: dict[fx.Node, int] = {}
        todo = [(node, self._stages - 1) for node in self._outputs]
        todo += [(node, self._stage_of[node]) for node in self._stage_of if self._has_effects(node)]
        while todo:
            node, user = todo.pop()
            stage = self._stage_of.get(node, user)
            until[node] = max(until.get(node, 0), user)
            if node not in needed[stage]:
                needed[stage].add(node)
                todo += [(argument, stage) for argument in node.all_input_nodes]
                todo += [(other, stage) for other in self._copies.together.get(node, ())]
        return needed, until

    def _has_effects(self, node: fx.Node) -> bool:
        return has_effects(node, self._traced.calls.get(node))

    def parts(self) -> list[Part]:
        returned: list[list[fx.Node]] = []
        for stage in range(self._stages - 1):
            passed = [n for n in self._nodes if self._stage_of.get(n, self._stages) <= stage < self._until.get(n, 0)]
            returned.append(self._identities.in_order(passed))
            for node in returned[-1]:
                if not isinstance(node.meta.get("val"), Tensor):
                    raise TraceError(
                        f"{node}, which is not a tensor, is computed in one stage and needed in a later one: only "
                        "tensors can pass between stages. Compute it from the batch, or cut elsewhere"
                    )
        returned.append(self._outputs)
        parts = [
            self._part(stage, returned[stage - 1] if stage else [], returned[stage]) for stage in range(self._stages)
        ]
        self._require_one_copy(parts)
        return parts

    def _require_one_copy(self, parts: Sequence[Part]) -> None:
        """Check that no buffer that is changed is in several stages, under any name: each would have its own copy.

        Raises:
            TraceError: one is.
        """
        groups = (group for _, group in self._copies.changing)
        changed = {str(node.target) for group in groups for node in group if node.op == "get_attr"}
        for call in self._traced.calls.values():
            changed.update(f"{call.name}.{name}" for name in call.updated)
        buffers = [part.buffers for part in parts]
        for name in sorted(changed):
            shared = self._traced.sharing.get(name, {name})  # a module may have made the buffer since
            if sum(not shared.isdisjoint(held) for held in buffers) > 1:
                also = sorted(shared & set().union(*buffers) - {name})
                raise TraceError(
                    f"the model changes the buffer {name}{f', which shares memory with {also[0]},' if also else ','} "
                    "and several stages use it: each has a copy of its own, and would not see the changes of others. "
                    "Use it in one layer alone, let that layer return the value, or cut elsewhere"
                )

    def _part(self, stage: int, received: Sequence[fx.Node], returned: Sequence[fx.Node]) -> Part:
        graph = fx.Graph()
        copied = {node: graph.placeholder(node.name) for node in received}
        mine = [node for node in self._nodes if node in self._needed[stage]]
        inputs = [node for node in mine if node.op == "placeholder"]
        calls: dict[fx.Node, Call] = {}
        for node in [*inputs, *mine]:
            if node not in copied:
                copied[node] = graph.node_copy(node, copied.__getitem__)
                if node in self._traced.calls:
                    calls[copied[node]] = self._traced.calls[node]
        last = stage == self._stages - 1

        def result(node: fx.Node) -> fx.Node:
            if last or node in self._used:
                return copied[node]
            # The later stage would send zeros back. In the whole model there is no gradient here.
            return graph.call_function(_DETACH, (copied[node],))

        graph.output(tuple(map(result, returned)))
        attributes = tuple(str(node.target) for node in mine if node.op == "get_attr")
        digest = self._identities.digest(returned)
        return Part(graph, len(received), tuple(str(node.target) for node in inputs), calls, attributes, digest)
