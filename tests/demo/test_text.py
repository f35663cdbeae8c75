"""The training text and the windows cut from it."""

from __future__ import annotations

import pytest
import torch

from symm_overlap.demo.text import Windows, length_problem, read_text


def test_default_text_is_english_and_long_enough_to_learn_from() -> None:
    text = read_text(None).decode()
    assert len(text) > 300_000
    assert text.count(" the ") > 3000


def test_windows_are_consecutive_bytes_of_the_text_from_everywhere_in_it() -> None:
    text = bytes(range(11))
    windows = Windows(text, seq=4, batch=64, seed=1)
    window = windows.next()
    assert window.shape == (5, 64)
    assert torch.equal(window - window[0], torch.arange(5).unsqueeze(1).expand(5, 64))
    assert set(window[0].tolist()) == set(range(7)), "a start never occurs, or a window runs past the end of the text"


def test_windows_depend_on_the_seed_alone() -> None:
    def first_two(seed: int) -> torch.Tensor:
        windows = Windows(read_text(None), seq=16, batch=2, seed=seed)
        return torch.stack([windows.next(), windows.next()])

    assert torch.equal(first_two(3), first_two(3))
    assert not torch.equal(first_two(3), first_two(4))
    assert not torch.equal(*first_two(3))


@pytest.mark.parametrize(("length", "ok"), [(16, False), (17, True)])
def test_a_text_must_hold_one_window_and_the_byte_after_it(length: int, ok: bool) -> None:
    text = bytes(length)
    assert (length_problem(text, 16, "short.txt") is None) == ok
    if ok:
        Windows(text, seq=16, batch=1, seed=0).next()
    else:
        assert "short.txt has 16 bytes; --seq 16 needs at least 17" in str(length_problem(text, 16, "short.txt"))
