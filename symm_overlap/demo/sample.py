"""Text generation with the sharded model: every rank draws the same bytes."""

from __future__ import annotations

import torch

from symm_overlap.demo.trainer import Trainer


def generate(trainer: Trainer, prompt: str, count: int, seq: int, seed: int, temperature: float = 0.7) -> str:
    """Continues ``prompt`` by ``count`` bytes, drawn at ``temperature`` from the model (0: the likeliest byte).

    Called by all ranks alike; all return the same text, prompt included. Each byte costs one forward pass over a window
    of ``seq`` bytes: the window is filled up behind the text, where a causal model does not look.
    """
    text = list(prompt.encode())
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        context = text[-seq:]
        window = torch.tensor(context + [0] * (seq - len(context))).unsqueeze(1)
        text.append(_draw(trainer.logits_at(window, len(context) - 1).cpu(), temperature, generator))
    return bytes(text).decode(errors="replace")


def printable(text: str, encoding: str) -> str:
    """``text`` for a terminal: newlines and tabs stay, everything else that is not printable is written as an escape.

    An untrained model draws any byte, and the control sequences of a terminal are bytes too. Characters that
    ``encoding`` lacks are escaped as well.
    """
    shown = (c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown).encode(encoding, "backslashreplace").decode(encoding)


def _draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits.double() / temperature).softmax(0), 1, generator=generator))
