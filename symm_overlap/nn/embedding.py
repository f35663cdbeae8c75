"""Compute an embedding whose weight is sharded by rows, the vocabulary, or by columns, the features.

Every rank has all indices. By rows, it looks up those that are in its part of the vocabulary, and the outputs of all
ranks are summed. All but one of them are zero, so every bit is that of the whole weight. By columns, it looks up its
part of the features. In both cases the gradient of the weight needs no communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from .forward import override
from .layouts import REDUCED, is_shard, same, summed, to_local_input, to_output
from .sharding import distribute, local_of

ROWS, COLUMNS = 0, 1


@dataclass(frozen=True, eq=False)
class EmbeddingLayout:
    """How a parallel embedding is laid out on the ranks, with its indices and its output.

    Attributes:
        mesh: the one-dimensional mesh of ranks.
        dim: the dimension of the weight that is sharded, `ROWS` or `COLUMNS`.
        input, output: the layouts of the indices (if they are not a DTensor) and of the output.
        use_local_output: whether the output is this rank's local tensor instead of a DTensor.
    """

    mesh: DeviceMesh
    dim: int
    input: Placement
    output: Placement
    use_local_output: bool

    def __deepcopy__(self, memo: Any) -> EmbeddingLayout:
        return self  # it never changes, and ranks are not copied with a model

    def __call__(self, module: Any, indices: Tensor) -> Tensor:
        """Return the embedding's output."""
        whole, _ = to_local_input(indices, self.mesh, self.input, _is_whole, Replicate())
        weight = local_of(module.weight, self.mesh, Shard(self.dim))
        layout: Placement = Shard(whole.dim())
        if self.dim == COLUMNS:
            found = F.embedding(whole, weight, module.padding_idx)
        else:
            found, layout = summed(self._own_rows(whole, weight, module), self.mesh, self.output)
        return to_output(found, self.mesh, layout, self.output, self.use_local_output)

    def _own_rows(self, indices: Tensor, weight: Tensor, module: Any) -> Tensor:
        """Look up this rank's part of the vocabulary. The indices of other ranks' parts get zeros.

        Indices outside the whole vocabulary are an error on every rank, as if the embedding were not parallel.
        """
        # Compiled code is made anew for another num_embeddings. torch 2.13 does not do so for another whole size of a
        # DTensor whose part on this rank has the same size.
        rows, vocabulary = weight.shape[0], module.num_embeddings
        if vocabulary != module.weight.shape[0]:  # the weight was replaced
            vocabulary = module.weight.shape[0]
        first = self.mesh.get_local_rank() * -(-vocabulary // self.mesh.size())  # as torch shards it
        if rows == 0:  # F.embedding needs a row
            weight, first = F.pad(weight, (0, 0, 0, 1)), vocabulary - 1
        before = (indices >= 0) & (indices < first)
        after = (indices >= first + rows) & (indices < vocabulary)
        elsewhere = before | after
        padding = None if module.padding_idx is None else module.padding_idx - first
        if padding is not None and not 0 <= padding < rows:
            padding = None
        found = F.embedding((indices - first).masked_fill(elsewhere, 0), weight, padding)
        return found.masked_fill(elsewhere.unsqueeze(-1), 0)


def install(
    module: nn.Embedding, mesh: DeviceMesh, dim: int, layouts: tuple[Placement, Placement], local: bool, src: int | None
) -> None:
    """Make an embedding parallel.

    Args:
        dim: the dimension of the weight that is sharded, `ROWS` or `COLUMNS`.
        layouts: those of the indices and of the output.
        local: whether the output is this rank's local tensor instead of a DTensor.
        src: the rank whose values all ranks get; None: each rank's own.

    Raises:
        ValueError: see `symm_overlap.nn.sharding.distribute`.
    """
    distribute(module, "weight", mesh, Shard(dim), src)
    override(module, _forward, parallel=EmbeddingLayout(mesh, dim, *layouts, local))


def is_ours(module: nn.Embedding, mesh: DeviceMesh, dim: int, output: Placement) -> bool:
    """True if `install` can make this embedding parallel. Any other is left to torch's style."""
    options = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    if options or type(module).forward is not nn.Embedding.forward or "forward" in vars(module):
        return False
    if module.weight.dtype not in REDUCED or not (is_shard(output) or isinstance(output, Replicate)):
        return False
    size: int = module.weight.shape[dim]
    return size % mesh.size() == 0 if dim == COLUMNS else size > 0


def _forward(module: Any, input: Tensor) -> Tensor:
    output: Tensor = module.parallel(module, input)
    return output


def _is_whole(layout: Placement, indices: Tensor) -> bool:
    return same(layout, Replicate(), indices.dim())
