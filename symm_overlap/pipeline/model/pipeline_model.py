"""`PipelineModel`: an ordinary model that runs as a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..runtime import PipelineRuntime, Stage
from ..schedule import Schedule
from ._torch import TensorChunkSpec, tree_flatten, tree_unflatten
from .agreement import Agreement
from .batch import Batch, Entries
from .environment import autocast_state, device_of, schedule_for
from .layers import Classes, layers_of
from .loss import on_all_ranks
from .parts import Parts
from .sequential_cut import Names, SequentialCut
from .sizes import Costs, Partition
from .stage_module import Tensors, runs_of, shapes_of
from .traced_cut import TracedCut, Wanted
from .values import Init


class PipelineModel:
    """A model whose layers are distributed over the ranks of a group and trained with a pipeline schedule.

    A step is equivalent to this with the whole model, but each rank holds only a part of it::

        model(**batch).loss.backward()

    The loss of a step is the mean of the losses of the microbatches, and gradients are those of this mean. Collective:
    every rank creates the model with the same arguments, and runs the same batches. The parts are created with the
    first batch, or by `build`. Until then there are no parameters for an optimizer.

    Args:
        model: any module. A model on the meta device gets memory only for this rank's parameters. The model must not be
            used afterwards: the parts consist of its own modules, which keep their names, hooks and classes.
        layer_cls: the class of the layers between which the model may be cut, its name, or a tuple of several.
        layer_names: alternatively, names of layers, where ``*`` matches anything but a dot: ``"blocks.*"``. With
            neither, the layers are the modules in the ``ModuleList`` or ``Sequential`` with the most parameters.
        num_microbatches: how many microbatches a batch is cut into.
        schedule: a `Schedule`, or the name of a generator.
        stages_per_rank: how many stages a rank has, if ``schedule`` is a name.
        loss: ``loss(output, batch[target])`` returns a tensor of one number. By default the model returns its loss, as
            a tensor or as ``.loss`` or ``["loss"]``.
        target: the entry of the batch that is passed to ``loss``, and not to the model. None: ``loss(output)``.
        partition: "auto": the simulator chooses the partition of layers with the shortest step. "balanced": the longest
            stage is as short as possible. "even": stages have equal numbers of layers. Otherwise the number of layers
            of each stage, or the names of the first layers of all stages except the first.
        costs: "flops" counts the FLOPs of each layer's forward, "parameters" counts parameters; or a number for each
            layer, or `LayerCosts`. Modules before and after the layers count with the first and the last layer.
        batch_dims: for entries of the batch, the dimension along which each is cut into microbatches, or None if every
            microbatch needs all of it. By default 0, if all have the same size.
        device: where parameters go. By default they stay where they are, and parameters on the meta device go to
            torch's default device.
        init: called with each module on the meta device whose own tensors need values. By default the module's
            ``reset_parameters`` is called; with ``state_dict`` only if a buffer is in no state dict.
        state_dict: the state dict of the whole model, from which a rank copies the values of its own part.
        trace: False calls ``first`` modules, layers and ``last`` modules one after another, and does not analyse the
            model's forward.
        first, last, kwargs_of: for ``trace=False``, the names of the modules before and after the layers, and for names
            of modules the entries of the batch that they get by keyword. Other entries go to the first module.
        group: the ranks of the pipeline, in order; by default all ranks.
        transport: see `PipelineRuntime`.
        loss_on_all_ranks: whether `run_train` returns the loss on every rank, at the cost of a broadcast.

    Raises:
        ValueError, TypeError: arguments do not fit the model, or the schedule does not fit the ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        layer_cls: Classes | None = None,
        *,
        layer_names: Names | None = None,
        num_microbatches: int,
        schedule: Schedule | str = "1F1B",
        stages_per_rank: int | None = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
        target: str | None = "target",
        partition: Partition = "auto",
        costs: Costs = "flops",
        batch_dims: Mapping[str, int | None] | None = None,
        device: torch.device | str | None = None,
        init: Init | None = None,
        state_dict: Mapping[str, Tensor] | None = None,
        trace: bool = True,
        first: Names = (),
        last: Names = (),
        kwargs_of: Mapping[str, Names] | None = None,
        group: dist.ProcessGroup | None = None,
        transport: str | None = None,
        loss_on_all_ranks: bool = False,
    ) -> None:
        self.schedule = schedule_for(schedule, num_microbatches, stages_per_rank, group)
        self._loss, self._target = loss, target if loss is not None else None
        self._batch_dims = dict(batch_dims or {})
        self._group, self._transport, self._everywhere = group, transport, loss_on_all_ranks
        layers = layers_of(model, layer_cls, layer_names)
        wanted = None if device is None else torch.device(device)
        self._cut: TracedCut | SequentialCut
        if trace:
            if first or last or kwargs_of:
                raise ValueError("first, last and kwargs_of are for trace=False: tracing finds them in the model")
            self._cut = TracedCut(model, layers, device_of(model, wanted), self.schedule, partition, costs)
        else:
            self._cut = SequentialCut(model, layers, self.schedule, partition, costs, first, last, kwargs_of)
        rank = dist.get_rank(group)
        self._parts = Parts(model, self.schedule, rank, wanted, device_of(model, wanted), init, state_dict)
        self._agreement = Agreement(group)
        self._mode: bool | None = None  # as the model was, until train() or eval() is called
        self._runtimes: dict[Hashable, PipelineRuntime] = {}
        self._traced: dict[Hashable, str] = {}  # what stages pass on, for each kind of microbatch
        self._scalars: list[bool] = []

    @property
    def stages(self) -> list[Stage]:
        """The stages of this rank. Their ``module`` holds the model's own modules under the model's own names."""
        return self._parts.stages

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        self._parts.require()
        return self._cut.sizes

    def build(self, **batch: Any) -> PipelineModel:
        """Cut the model for batches like this one, and distribute its parameters. Runs do so with their first batch.

        Args:
            batch: see `run_train`.

        Raises:
            TraceError, ValueError, TypeError: the model cannot be cut; the message says where, and what to do.
            RuntimeError: another rank could not create its part.
        """
        with self._agreement.rejecting():
            self._build(self._read(batch))
        return self

    def run_train(self, **batch: Any) -> Tensor | None:
        """Run one step, and add gradients to those of this rank's parameters.

        Args:
            batch: the keyword arguments of the model, and the target of the loss; the same on every rank.

        Returns:
            The mean of the microbatches' losses on the rank of the last stage. None on other ranks, unless
            ``loss_on_all_ranks`` is set.

        Raises:
            TraceError, ValueError, TypeError: the model cannot be cut, or it cannot run with this batch.
        """
        with self._agreement.rejecting():
            read = self._read(batch)
            if self._target is not None and self._target not in batch:
                raise ValueError(
                    f"the batch has no {self._target!r}, the target of the loss: it has {', '.join(batch)}. If the "
                    "model itself gets the target, and returns the loss, give target=None"
                )
            self._build(read)
            runtime = self._runtime(read, "loss", gradients=True)
        losses: list[Tensor] = []
        runtime.step(**read.uncut, losses=losses, return_outputs=False)
        loss = torch.stack([each.reshape(()) for each in losses]).mean() if losses else None
        if self._everywhere:
            loss = on_all_ranks(loss, self._group, self.schedule.rank_of(self.schedule.stages - 1), self.parameters())
        return loss

    def run_eval(self, **batch: Any) -> Any:
        """Run forwards only, without gradients: ``model(**batch)``.

        Args:
            batch: see `run_train`; the target of the loss may be left out.

        Returns:
            On the rank of the last stage, what the model returns. Microbatches are concatenated along dimension 0, and
            floating-point tensors without dimensions, such as a loss, are averaged. If the loss is computed outside of
            the model and its target is in the batch, the mean of the losses. None on other ranks.
        """
        with self._agreement.rejecting():
            read = self._read(batch)
            self._build(read)
            with_loss = self._loss is not None and self._target in batch
            runtime = self._runtime(read, "loss" if with_loss else "outputs", gradients=False)
        returned = runtime.eval(**read.uncut)
        if returned is None:
            return None
        leaves = self._spec.flatten_up_to(returned)  # a constant may have become a list of the microbatches' constants
        pairs = zip(leaves, self._scalars, strict=True)
        means = [leaf.mean() if scalar and leaf.is_floating_point() else leaf for leaf, scalar in pairs]
        return tree_unflatten(means, self._spec)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Clip all ranks' gradients by the norm of the whole model's, and return it. Collective; see `PipelineRuntime`.

        Raises:
            RuntimeError: no step has run, or ``error_if_nonfinite`` is set and the norm is not finite.
            ValueError: ``norm_type`` is not above 0.
        """
        if not self._runtimes:
            raise RuntimeError("clip_grad_norm_: there are no gradients, because no step has run: call run_train first")
        return next(iter(self._runtimes.values())).clip_grad_norm_(max_norm, norm_type, error_if_nonfinite, foreach)

    def train(self, mode: bool = True) -> PipelineModel:
        """Set training or evaluation mode for all modules, as ``model.train(mode)`` does."""
        self._mode = mode
        self._cut.model.train(mode)
        self._parts.train(mode, self._cut.model)
        return self

    def eval(self) -> PipelineModel:
        """Set evaluation mode: ``train(False)``."""
        return self.train(False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return an iterator over the parameters of this rank, each once, for its optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return an iterator over the parameters of this rank, each once, with their names in the whole model."""
        return self._parts.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of this rank's part. All ranks' together are that of the whole model without what the
        first batch did not use."""
        return self._parts.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part from the state dict of the whole model, or of a part. Whole tensors may be loaded into
        parameters that are DTensors, such as FSDP's.

        Raises:
            RuntimeError: with ``strict``, a tensor of this rank is missing, or shapes differ.
        """
        self._parts.load_state_dict(state_dict, strict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a PipelineModel cannot be copied or pickled, because it belongs to its process group: make a second one, "
            "and load the state dict of the first one"
        )

    def _read(self, batch: Mapping[str, Any]) -> Batch:
        return Batch.of(batch, self._target, self._batch_dims, self.schedule.microbatches)

    def _build(self, read: Batch) -> None:
        if not self._parts.built:
            names = self._cut.modules(read.inputs, read.microbatches(self.schedule.microbatches)[0])
            self._parts.build(names, self._cut.model)
        if self._agreement.reach(self._cut.agreed):
            self._parts.make_copies_equal(self._group)

    def _runtime(self, read: Batch, returns: str, *, gradients: bool) -> PipelineRuntime:
        """Return the runtime for batches of these shapes: messages through symmetric memory have fixed shapes."""
        what = read.inputs.constants, read.target.constants, self._mode, returns, gradients, autocast_state()
        modules = {stage.index: module for stage, module in self._parts.modules()}
        shapes = []
        for tensors in read.microbatches(self.schedule.microbatches):
            shapes.append(shapes_of(tensors))
            if (which := (what, shapes[-1])) not in self._traced:
                finish = self._finish(read.target, returns)
                wanted = Wanted(finish, gradients, loss_alone=gradients and self._loss is None)
                for index, maker in self._cut.runs(modules, read.inputs, tensors, wanted).items():
                    runs_of(modules[index]).makers[which] = maker
                    runs_of(modules[index]).function(which, modules[index])  # now: compiled stages cannot trace this
                self._traced[which] = self._cut.passed
        for runs in map(runs_of, modules.values()):
            runs.what, runs.shared = what, read.shared
        key = what, tuple(shapes)
        if key not in self._runtimes:
            self._runtimes[key] = PipelineRuntime(
                self.stages,
                self.schedule,
                group=self._group,
                loss=lambda result, target: result,  # the last stage returns the loss
                chunk_kwargs={name: TensorChunkSpec(dim) for name, (_, dim) in read.cut.items()},
                tied=self._parts.tied,
                transport=self._transport,
            )
            passed = dict.fromkeys(self._traced[what, each] for each in shapes)
            self._runtimes[key].describe_batches(read.described(self._mode, gradients, autocast_state(), passed))
        return self._runtimes[key]

    def _finish(self, target: Entries, returns: str) -> Callable[[Any, Tensors], Any]:
        def finish(result: Any, tensors: Tensors) -> Any:
            if returns == "loss" and self._loss is not None:
                result = self._loss(result, *target.filled(tensors).values())
            leaves, self._spec = tree_flatten(result)
            self._scalars = [isinstance(leaf, Tensor) and not leaf.dim() for leaf in leaves]
            return result

        return finish
