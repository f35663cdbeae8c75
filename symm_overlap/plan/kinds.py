"""Kinds of steps: each kind has a record, which the layer that owns the kind registers.

A step names its kind by a string. All code that processes plans (order, verify, simulate, draw) looks up the kind's
record for what it needs to know. So a layer adds a kind by registering a record, and changes nothing in this package.
This package registers only the kinds that every plan needs:

=======  ===========================================================================================================
fork     first step, on the caller's stream: the caller's inputs are ready (the caller may just have written them)
join     last step, on the caller's stream: the caller may read the outputs and overwrite the inputs
sleep    gives the other streams a moment to start first; it orders nothing
signal   tells all of ``peers``, on ``channel``, that everything before this step on its stream is done
wait     the n-th wait for a (peer, channel) returns once the n-th signal of that peer on that channel has come; a wait
         for several peers returns once the signals of all of them have come
barrier  returns once every rank has arrived
=======  ===========================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

OCCUPIES = ("SMs", "copy engine", "")
ROLES = ("compute", "copy", "meet", "order")
MEETS = ("", "posts", "awaits", "everyone")


@dataclass(frozen=True, slots=True)
class Kind:
    """The record of a kind of step: the properties that verifiers, the simulator and drawings use.

    Attributes:
        name: the string in ``Step.kind``.
        occupies: the hardware that a step holds while it runs: "SMs", "copy engine", or "" for nothing.
        role: "compute" (arithmetic), "copy" (moves data), "meet" (ranks wait for each other), or "order" (orders the
            steps of its own rank).
        colour: a CSS colour for the boxes of such steps in drawings.
        meets: how a step of role "meet" synchronises with other ranks; "" for every other role. "posts": it signals
            its peers and continues. "awaits": it waits for a post of each of its peers. "everyone": it waits until all
            ranks have arrived.
        memory: whether a step may read and write memory. False for pure synchronisation.
        overhead: whether the arithmetic is needed only because several ranks share the work, such as a sum of partial
            results. Such steps do not count as compute time when the plan is compared with one rank computing alone.
        frees: whether the memory that a step writes is freed by it, such as parameters that are resharded. No step may
            read that memory until another step has written it.

    Raises:
        ValueError: a field has a value that is not allowed.
    """

    name: str
    occupies: str
    role: str
    colour: str
    meets: str = ""
    memory: bool = True
    overhead: bool = False
    frees: bool = False

    def __post_init__(self) -> None:
        for field, allowed in (("occupies", OCCUPIES), ("role", ROLES), ("meets", MEETS)):
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"{field} of kind {self.name!r} is {value!r}: it must be one of {allowed}")
        if (self.role == "meet") != bool(self.meets):
            raise ValueError(
                f"kind {self.name!r} has role {self.role!r} and meets {self.meets!r}: set meets if the role is 'meet', "
                "and leave it empty for every other role"
            )


_registered: dict[str, Kind] = {}


def register(record: Kind) -> Kind:
    """Register a kind, so that plans may use it, and return it.

    Registering an equal record again does nothing, so a module may be imported twice.

    Raises:
        ValueError: a different record is already registered under that name.
    """
    known = _registered.setdefault(record.name, record)
    if known != record:
        raise ValueError(f"kind {record.name!r} is already registered as {known}: choose another name than {record}")
    return known


def find(name: str) -> Kind | None:
    """Return the record of a kind, or None if no layer has registered it."""
    return _registered.get(name)


def kind(name: str) -> Kind:
    """Return the record of a kind.

    Raises:
        ValueError: no layer has registered the kind.
    """
    record = _registered.get(name)
    if record is None:
        raise ValueError(
            f"kind {name!r} is not registered (known: {', '.join(sorted(_registered))}): import the layer that owns "
            "it, or register it with symm_overlap.plan.register"
        )
    return record


register(Kind("fork", "", "order", "#bab0ac"))
register(Kind("join", "", "order", "#bab0ac"))
register(Kind("sleep", "", "order", "#c9b8e8", memory=False))
register(Kind("signal", "", "meet", "#54a24b", meets="posts", memory=False))
register(Kind("wait", "", "meet", "#e6e6e6", meets="awaits", memory=False))
register(Kind("barrier", "", "meet", "#d9b3b3", meets="everyone", memory=False))
