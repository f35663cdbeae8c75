"""The arithmetic of epochs and the layout of a GPU lane's control block: the kernels' headers, built for the host."""

from pathlib import Path

import pytest

from tests.runtime.host_program import compile_program, run_program

LINE = 32  # 32-bit words in 128 bytes

PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "common/control_block.h"

using symm_overlap::ControlBlock;
using symm_overlap::epoch_reached;

int main(int, char** argv) {
  if (argv[1][0] == 'e') {  // epoch FOUND EXPECTED
    std::printf("%d\\n", epoch_reached(std::strtoul(argv[2], nullptr, 0), std::strtoul(argv[3], nullptr, 0)));
    return 0;
  }
  const ControlBlock block{std::atoi(argv[2]), std::atoi(argv[3])};  // layout WORLD CHANNELS
  std::printf("words %zu\\nnotice %zu\\nfailed %zu\\n", block.words(), block.notice(), block.failed());
  std::printf("ticket %zu\\nticket %zu\\n", block.ticket(0), block.ticket(1));
  for (int rank = 0; rank < block.world; ++rank) {
    std::printf("call %zu\\ngone %zu\\n", block.call(rank), block.gone(rank));
    for (int channel = 0; channel < block.channels; ++channel) {
      std::printf("slot %zu\\nreached %zu\\n", block.slot(rank, channel), block.reached(rank, channel));
      std::printf("sent %zu\\nawaited %zu\\n", block.sent(rank, channel), block.awaited(rank, channel));
    }
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("control_block")
    source = folder / "main.cpp"
    source.write_text(PROGRAM)
    return compile_program(source, folder / "main")


@pytest.mark.parametrize(
    ("found", "expected", "reached"),
    [
        (0, 1, False),
        (1, 1, True),
        (2, 1, True),
        (0xFFFFFFFF, 0, False),  # the next epoch comes after the wrap
        (0, 0xFFFFFFFF, True),
        (0, 0, True),
        (5, 0xFFFFFFF0, True),
        (0xFFFFFFF0, 5, False),
        (0x7FFFFFFF, 0x80000000, False),  # 2**31 is no boundary either
        (0x80000000, 0x7FFFFFFF, True),
    ],
)
def test_an_epoch_is_compared_across_the_wrap(program: Path, found: int, expected: int, reached: bool) -> None:
    assert run_program(program, "epoch", found, expected) == f"{int(reached)}\n"


@pytest.mark.parametrize(("world", "channels"), [(1, 1), (2, 5), (3, 4), (64, 5), (130, 3)])
def test_nothing_in_a_control_block_overlaps(program: Path, world: int, channels: int) -> None:
    words: dict[str, list[int]] = {}
    for line in run_program(program, "layout", world, channels).splitlines():
        name, word = line.split()
        words.setdefault(name, []).append(int(word))
    pairs = world * channels
    assert [len(words[name]) for name in ("slot", "sent", "awaited", "notice", "failed")] == [pairs, pairs, pairs, 1, 1]
    assert len(words["call"]) == world

    written_by_others = words["slot"] + words["notice"] + words["failed"] + words["call"]
    assert all(word % LINE == 0 for word in written_by_others)  # each word starts a cache line ...
    lines = [word // LINE for word in written_by_others]
    assert len(set(lines)) == len(lines)  # ... and shares it with no other such word

    written_here = words["reached"] + words["gone"]
    assert [word - LINE // 2 for word in written_here] == words["slot"] + words[
        "call"
    ]  # half a line after the words that others write

    counters = words["sent"] + words["awaited"] + words["ticket"]
    assert len(set(counters)) == len(counters)
    assert not {word // LINE for word in counters} & set(lines)
    assert max(written_by_others + counters) < words["words"][0]
