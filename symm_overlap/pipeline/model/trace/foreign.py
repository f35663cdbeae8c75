"""Parameters that code uses without reading them from its own module: through closures, global variables or lists.

If a whole module does so, and the parameter belongs to another stage, it would compute with a copy that nobody trains.
This is an error, unless the parameter is frozen. Closures of the code between layers may refer to the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from .._torch import FakeTensor, tree_flatten, tree_unflatten
from .error import PassedError


class Parameters(TorchFunctionMode):
    """The parameters of a skeleton. While this is open, the code between layers may use no others.

    While torch traces, it replaces the parameters of modules. A closure that has a parameter itself, and not the module
    in which it is, uses the one of before.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._before = dict(model.named_parameters())  # which also keeps their ids from being used again
        self._names = {id(parameter): name for name, parameter in self._before.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, replaced = kwargs or {}, False
        for leaf in leaves_of(args, kwargs):
            if type(leaf) is nn.Parameter and leaf.requires_grad:
                raise PassedError(
                    f"the model uses a parameter of shape {tuple(leaf.shape)} that belongs to none of its modules, or "
                    "that it does not read from them, but for example from a global variable: it would not be trained"
                )
            replaced = replaced or id(leaf) in self._names
        if replaced:
            leaves, spec = tree_flatten((args, kwargs))
            args, kwargs = tree_unflatten([self._now(leaf) for leaf in leaves], spec)
        return func(*args, **kwargs)

    def _now(self, leaf: Any) -> Any:
        name = self._names.get(id(leaf))
        return leaf if name is None else self._model.get_parameter(name)

    def require_own(self, used: Iterable[nn.Parameter], what: str, module: nn.Module, given: Iterable[Tensor]) -> None:
        """Check that a whole module uses only its own parameters, and those that are passed to it.

        Args:
            used: the parameters that it has used.
            what: the name and the class of the module.
            given: the tensors that are passed to it.

        Raises:
            PassedError: it uses others.
        """
        known = {id(tensor) for tensor in (*module.parameters(), *given)}
        others = [parameter for parameter in used if parameter.requires_grad and id(parameter) not in known]
        if not others:
            return
        names = {**self._names, **{id(parameter): name for name, parameter in self._model.named_parameters()}}
        own = {names.get(id(parameter)) for parameter in module.parameters()}
        for parameter in others:
            shape = f"of shape {tuple(parameter.shape)}" if _is_real(parameter) else ""
            name = names.get(id(parameter), shape)
            if name and name not in own:  # without a name, the module has just created it
                raise PassedError(
                    f"{what} uses the parameter {name}, which it does not have: on other ranks it would be a copy that "
                    "is not trained. Pass it to the module as an argument, or make it an attribute of the module, "
                    "which ties the two"
                )


def leaves_of(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments of an operator, and what is in lists and tuples among them. It is called for each operator,
    and is much faster than ``tree_flatten``.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            yield from leaves_of(value, {})
        else:
            yield value


def _is_real(parameter: nn.Parameter) -> bool:
    return not isinstance(parameter, (FakeTensor, DTensor))
