"""The layer below the ops: one back end for each kind of device, the lanes that calls run on, and which ranks can reach
each other's memory.
"""

from .backend import Backend, Traits, Workspace
from .backends import TRAITS, backend_of
from .call_hash import call_hash
from .call_lock import InMiddleOfCallError
from .costs import Device, DeviceCosts, costs_of, record_of
from .freeing import let_go
from .group import GroupState, state_of
from .lane import Lane, NotCapturedError, NotPreparedError, lane_of_pipelines
from .lane_group import are_enqueued, lane_group, message_group, wire_device
from .lasting_memory import lasting
from .merged import meets_in_kernels
from .ranges import around, ranged
from .script import Script
from .symmetric import new_symmetric, rendezvous
from .topology import compares, direct_access
from .work import (
    Add,
    AwaitFlag,
    Copy,
    Fixed,
    Launch,
    Make,
    Multiply,
    MultiplyScaled,
    Operand,
    Part,
    RaiseFlag,
    Slice,
    Sum,
    Work,
    WorkOf,
    carry_out,
    tensor_of,
    view_of,
)

__all__ = [
    "TRAITS",
    "Add",
    "AwaitFlag",
    "Backend",
    "Copy",
    "Device",
    "DeviceCosts",
    "Fixed",
    "GroupState",
    "InMiddleOfCallError",
    "Lane",
    "Launch",
    "Make",
    "Multiply",
    "MultiplyScaled",
    "NotCapturedError",
    "NotPreparedError",
    "Operand",
    "Part",
    "RaiseFlag",
    "Script",
    "Slice",
    "Sum",
    "Traits",
    "Work",
    "WorkOf",
    "Workspace",
    "are_enqueued",
    "around",
    "backend_of",
    "call_hash",
    "carry_out",
    "compares",
    "costs_of",
    "direct_access",
    "lane_group",
    "lane_of_pipelines",
    "lasting",
    "let_go",
    "meets_in_kernels",
    "message_group",
    "new_symmetric",
    "ranged",
    "record_of",
    "rendezvous",
    "state_of",
    "tensor_of",
    "view_of",
    "wire_device",
]
