"""Synthetic recall: does a model bring back a fact it was told, and from how far?

A fact is a key followed by its value; it is asked by the key alone, and the token after it is the answer. Three tasks
write facts and questions over a background of filler (random tokens, or real text):

    facts    told in one chunk of text, asked given numbers of chunks later: only a memory can answer
    mqar     multi-query associative recall (Zoology, Arora et al. 2023): all facts first, then questions anywhere
    needle   one fact at a given depth of the background, asked at the end

Shapes: `B` rows, `T` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Symbols:
    """Disjoint tokens a task is written in."""

    keys: Tensor  # [keys] token numbers
    values: Tensor  # [values]
    filler: Tensor  # [fillers]

    @classmethod
    def from_vocabulary(cls, vocab_size: int, keys: int, values: int) -> Symbols:
        """The last `keys + values` tokens of a vocabulary, and all before them as filler.

        Raises:
            ValueError: when the vocabulary has no token left for filler.
        """
        fillers = vocab_size - keys - values
        if min(fillers, keys, values) < 1:
            raise ValueError(f"vocab_size={vocab_size} holds no {keys} keys, {values} values and a filler token")
        filler, key, value = torch.arange(vocab_size).split((fillers, keys, values))
        return cls(key, value, filler)

    def background(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Random filler, `[rows, length]`."""
        return self.filler[torch.randint(len(self.filler), (rows, length), generator=generator)]


@dataclass(frozen=True)
class Recall:
    """Token sequences and which of their tokens are answers: to be predicted from the tokens before them."""

    tokens: Tensor  # [B, T]
    answers: Tensor  # [B, T], True at the answers, never at the first token
    values: Tensor  # the tokens an answer can be; guessing gives 1 / len(values)

    def accuracy(self, logits: Tensor) -> float:
        """Share of answers that lead the other values in the logits `[B, T, V]` of the token before."""
        asked = self.answers[:, 1:]
        scores = logits[:, :-1][asked][:, self.values.to(logits.device)]
        return (self.values[scores.argmax(-1).cpu()] == self.tokens[:, 1:][asked]).double().mean().item()


def facts(
    symbols: Symbols,
    background: Tensor,
    chunk: int,
    apart: Sequence[int],
    pairs: int,
    generator: torch.Generator,
) -> dict[int, Recall]:
    """Every chunk of the text asks the facts told some chunks before it, then tells `pairs` new ones.

    Keys do not come back while they may be asked, so that a question has one answer.

    Args:
        symbols: at least `pairs * (max(apart) + 1)` keys.
        background: `[B, T]`, T a multiple of `chunk`.
        chunk: tokens per chunk, at least two for each pair told and for each asked.
        apart: chunks between telling and asking. Distance 0 rehearses: facts are asked in the chunk that tells them.
    Returns:
        for each distance the same tokens, and its own answers.
    """
    rows, length = background.shape
    questions = [distance for distance in sorted(apart, reverse=True) if distance > 0]
    sections = [*questions, None, *([0] if 0 in apart else [])]  # None: where the facts are told
    needed, period = 2 * pairs * len(sections), max(apart) + 1
    if chunk < needed or length % chunk or len(symbols.keys) < pairs * period:
        raise ValueError(
            f"chunk={chunk}, length={length}, keys={len(symbols.keys)}: {pairs} facts asked {list(apart)} chunks later "
            f"need chunks of at least {needed} tokens, a whole number of them, and at least {pairs * period} keys"
        )
    tokens = background.clone()
    answers = {distance: torch.zeros_like(background, dtype=torch.bool) for distance in apart}
    told: list[Tensor] = []
    for index, start in enumerate(range(0, length, chunk)):
        told.append(_draw(symbols, symbols.keys[index % period :: period], rows, pairs, generator))
        for section, distance in enumerate(sections):
            first, last = start + 2 * pairs * section, start + 2 * pairs * (section + 1)
            if distance is None:
                tokens[:, first:last] = told[index].flatten(1)
            elif distance <= index:
                tokens[:, first:last] = _shuffled(told[index - distance], generator)
                answers[distance][:, first + 1 : last : 2] = True
    return {distance: Recall(tokens, answers[distance], symbols.values) for distance in apart}


def mqar(symbols: Symbols, background: Tensor, pairs: int, generator: torch.Generator) -> Recall:
    """All facts at the start of the background `[B, T]`, T >= 4 * pairs, then each asked once, anywhere after."""
    rows, length = background.shape
    places = (length - 2 * pairs) // 2  # two tokens each, after the facts
    if places < pairs or len(symbols.keys) < pairs:
        raise ValueError(f"pairs={pairs} need {4 * pairs} tokens and {pairs} keys: {length}, {len(symbols.keys)} given")
    tokens, answers = background.clone(), torch.zeros_like(background, dtype=torch.bool)
    told = _draw(symbols, symbols.keys, rows, pairs, generator)
    tokens[:, : 2 * pairs] = told.flatten(1)
    place = 2 * pairs + 2 * torch.rand(rows, places, generator=generator).argsort(1)[:, :pairs]
    for offset in range(2):
        tokens.scatter_(1, place + offset, told[:, :, offset])
    return Recall(tokens, answers.scatter_(1, place + 1, True), symbols.values)


def needle(symbols: Symbols, background: Tensor, depth: float, generator: torch.Generator) -> Recall:
    """One fact at `depth` (0 the start, 1 just before the question) of the background `[B, T]`, asked at its end."""
    rows, length = background.shape
    if length < 4 or not 0 <= depth <= 1:
        raise ValueError(f"length={length}, depth={depth}: need at least 4 tokens and a depth in [0, 1]")
    tokens, answers = background.clone(), torch.zeros_like(background, dtype=torch.bool)
    told = _draw(symbols, symbols.keys, rows, 1, generator).flatten(1)
    start = round(depth * (length - 4))
    tokens[:, start : start + 2] = told
    tokens[:, -2:] = told
    answers[:, -1] = True
    return Recall(tokens, answers, symbols.values)


def _draw(symbols: Symbols, keys: Tensor, rows: int, pairs: int, generator: torch.Generator) -> Tensor:
    """Facts with distinct keys, `[rows, pairs, 2]`."""
    key = torch.rand(rows, len(keys), generator=generator).argsort(1)[:, :pairs]
    value = torch.randint(len(symbols.values), (rows, pairs), generator=generator)
    return torch.stack((keys[key], symbols.values[value]), dim=2)


def _shuffled(told: Tensor, generator: torch.Generator) -> Tensor:
    """The facts `[rows, pairs, 2]` in another order, as tokens `[rows, 2 * pairs]`."""
    order = torch.rand(told.shape[:2], generator=generator).argsort(1)
    return told.gather(1, order[..., None].expand_as(told)).flatten(1)
