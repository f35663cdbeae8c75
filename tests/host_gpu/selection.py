"""A plugin of pytest: which GPU tests cannot run on the host GPU, and why."""

from __future__ import annotations

import pytest

SKIPPED = {
    "test_signals.py::test_sleep_takes_time_in_proportion": "times",
    "test_compile.py::test_a_compiled_model_computes_what_it_computes_in_eager_mode": "the interpreter cannot run "
    "what Inductor generates: blocks without sizes",
    "test_emulation.py::test_every_method_is_right_and_the_link_keeps_its_pace": "times",
    "test_failures.py::test_a_deadline_holds_while_a_thread_keeps_pythons_lock": "torch's operators are Python here",
    "test_fsdp_prefetch.py::test_a_step_takes_its_compute_and_the_communication_that_nothing_can_hide": "times",
    "test_emulation.py::test_start_orders_are_counted": "takes a host minutes",
    "test_fused_kernels.py::test_values": "takes a host minutes; test_values.py has smaller ones",
    "test_shapes.py::test_large_matmuls": "takes a host minutes",
}
"""Parts of the names of tests, and why each is skipped. "times": it compares some, for which
threads of a host are not punctual enough."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name, reason in SKIPPED.items():
            if name in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=f"host GPU: {reason}"))
