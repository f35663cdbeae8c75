"""Overlap plans: who does what, on which stream, in which order, as data to execute, verify, simulate and draw."""

from .all_gather_consume import all_gather_consume
from .execute import Streams, Table, delayed, execute
from .produce_all_reduce import produce_all_reduce
from .produce_reduce_scatter import produce_reduce_scatter
from .program import Item, Program
from .step import CHANNELS, KINDS, Plan, Region, Step
from .streams import InlineStreams, ThreadStreams

__all__ = [
    "CHANNELS",
    "KINDS",
    "InlineStreams",
    "Item",
    "Plan",
    "Program",
    "Region",
    "Step",
    "Streams",
    "Table",
    "ThreadStreams",
    "all_gather_consume",
    "delayed",
    "execute",
    "produce_all_reduce",
    "produce_reduce_scatter",
]
