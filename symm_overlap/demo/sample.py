"""Text generation with the sharded model. Every rank draws the same bytes."""

from __future__ import annotations

import torch

from symm_overlap.demo.trainer import Trainer


def generate(trainer: Trainer, prompt: str, count: int, seq: int, seed: int, temperature: float = 0.7) -> str:
    """Continue ``prompt`` by ``count`` bytes, drawn from the model at ``temperature`` (0: the most likely byte).

    All ranks must call this with the same arguments. All return the same text, including the prompt. Each byte costs
    one forward pass over a window of ``seq`` bytes. The window is padded after the text, where a causal model does not
    look.
    """
    text = list(prompt.encode(errors="surrogateescape"))  # the bytes of the command line, even if they are not UTF-8
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        context = text[-seq:]
        window = torch.tensor(context + [0] * (seq - len(context))).unsqueeze(1)
        text.append(_draw(trainer.logits_at(window, len(context) - 1).cpu(), temperature, generator))
    return bytes(text).decode(errors="replace")


def printable(text: str, encoding: str | None) -> str:
    """Return ``text`` in a form that is safe for a terminal: escape all unprintable characters but newlines and tabs.

    An untrained model can draw any byte, including bytes that form control sequences of the terminal. Characters that
    ``encoding`` does not have are escaped too. None is the encoding of an output that holds any character.
    """
    encoding = encoding or "utf-8"
    shown = (c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown).encode(encoding, "backslashreplace").decode(encoding)


def _draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits.double() / temperature).softmax(0), 1, generator=generator))
