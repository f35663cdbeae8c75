"""Overlap plans: who does what, on which stream, in which order, as data to execute, verify, simulate and draw."""

from . import draw
from .builder import Builder
from .execute import Streams, Table, at_step, execute
from .kinds import Kind, kind, register
from .layout import Layout, layout
from .order import At, Calls, Problem
from .plan import Life, Plan
from .program import Item, Program
from .simulate import simulate
from .step import Region, Step
from .streams import InlineStreams, ThreadStreams
from .timeline import Costs, Event, Timeline
from .values import Contract, Name, Names, copied
from .verify import Report, plan_calls, verify, verify_planner

__all__ = [
    "At",
    "Builder",
    "Calls",
    "Contract",
    "Costs",
    "Event",
    "InlineStreams",
    "Item",
    "Kind",
    "Layout",
    "Life",
    "Name",
    "Names",
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
    "at_step",
    "copied",
    "draw",
    "execute",
    "kind",
    "layout",
    "plan_calls",
    "register",
    "simulate",
    "verify",
    "verify_planner",
]
