"""Overlap plans: who does what, on which stream, in which order, as data to execute, verify, simulate and draw."""

from . import draw
from .all_gather_consume import all_gather_consume
from .execute import Streams, Table, delayed, execute
from .order import At, Calls, Problem
from .produce_all_reduce import produce_all_reduce
from .produce_reduce_scatter import produce_reduce_scatter
from .program import Item, Program
from .redundant import redundant
from .simulate import simulate
from .step import CHANNELS, KINDS, Plan, Region, Step
from .streams import InlineStreams, ThreadStreams
from .timeline import Costs, Event, Timeline
from .verify import Report, plan_calls, verify, verify_planner

__all__ = [
    "CHANNELS",
    "KINDS",
    "At",
    "Calls",
    "Costs",
    "Event",
    "InlineStreams",
    "Item",
    "Plan",
    "Problem",
    "Program",
    "Region",
    "Report",
    "Step",
    "Streams",
    "Table",
    "ThreadStreams",
    "Timeline",
    "all_gather_consume",
    "delayed",
    "draw",
    "execute",
    "plan_calls",
    "produce_all_reduce",
    "produce_reduce_scatter",
    "redundant",
    "simulate",
    "verify",
    "verify_planner",
]
