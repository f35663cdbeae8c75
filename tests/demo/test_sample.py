"""Generated text is the same on every rank, and equals the text that one process generates."""

from __future__ import annotations

import pytest
import torch

from symm_overlap.demo.sample import generate, printable
from symm_overlap.demo.trainer import Trainer
from tests.demo.models import CONFIG, KINDS, alone, sharded, windows
from tests.ranks import Pool, Rank

COUNT = 40  # more than the window of 32 bytes, so that the window also slides


def texts_after_training(trainer: Trainer) -> list[str]:
    batches = windows()
    for _ in range(4):
        trainer.step(batches.next())
    return [generate(trainer, "The ", COUNT, CONFIG.seq, 5, temperature) for temperature in (0.0, 0.7)]


def texts_of_every_kind(me: Rank) -> dict[str, list[str]]:
    return {kind: texts_after_training(sharded(me, kind)) for kind in KINDS}


@pytest.mark.slow
def test_every_rank_generates_the_text_of_one_process(ranks: Pool) -> None:
    expected = texts_after_training(alone())
    assert ranks.run(2, texts_of_every_kind) == [dict.fromkeys(KINDS, expected)] * 2


def test_sample_continues_the_prompt_by_the_bytes_asked_for() -> None:
    text = generate(alone(), "ab", 7, CONFIG.seq, 0)
    assert text.startswith("ab")
    # Each byte that is not UTF-8 is shown as at most one replacement character.
    assert len("ab") < len(text) <= len("ab") + 7


def test_a_prompt_may_be_bytes_that_are_not_utf8() -> None:
    text = generate(alone(), "a\udce9b", 3, CONFIG.seq, 0)  # how Python reads the byte e9 from the command line
    assert text.startswith("a\ufffdb")


def test_model_sees_the_last_bytes_that_fit_its_window() -> None:
    seen = []

    def model(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(bytes(tokens.flatten().tolist()))
        return torch.nn.functional.one_hot(torch.full_like(tokens, ord("!")), 256).float()

    trainer = alone()
    trainer.model = model
    prompt = "0123456789abcdefghijklmnopqrstu"
    assert len(prompt) == CONFIG.seq - 1
    assert generate(trainer, prompt, 3, CONFIG.seq, 0, temperature=0) == prompt + "!!!"
    assert seen == [f"{prompt}\0".encode(), f"{prompt}!".encode(), f"{prompt[1:]}!!".encode()]


def test_sample_depends_on_the_seed_only_with_a_temperature() -> None:
    trainer = alone()
    drawn = {generate(trainer, "x", 12, CONFIG.seq, seed) for seed in range(3)}
    likeliest = {generate(trainer, "x", 12, CONFIG.seq, seed, temperature=0) for seed in range(3)}
    assert len(drawn) == 3
    assert len(likeliest) == 1


@pytest.mark.parametrize(
    ("text", "encoding", "shown"),
    [
        ("two lines\n\tand a tab", "utf-8", "two lines\n\tand a tab"),
        ("\x1b[2Jgone", "utf-8", "\\x1b[2Jgone"),
        ("\r\a\b\x00\x7f", "utf-8", "\\r\\x07\\x08\\x00\\x7f"),
        ("\x9b31m", "utf-8", "\\x9b31m"),  # a terminal that knows 8-bit controls reads it as ESC [
        ("\u202eright to left", "utf-8", "\\u202eright to left"),
        ("caf\u00e9 \ufffd", "utf-8", "caf\u00e9 \ufffd"),
        ("caf\u00e9 \ufffd", "ascii", "caf\\xe9 \\ufffd"),
        ("caf\u00e9 \ufffd", None, "caf\u00e9 \ufffd"),
    ],
    ids=[
        *("kept", "escape sequence", "single controls", "8-bit control", "direction", "accents", "ascii terminal"),
        "no terminal",
    ],
)
def test_what_a_terminal_would_obey_is_shown_as_an_escape(text: str, encoding: str | None, shown: str) -> None:
    assert printable(text, encoding) == shown
