"""Synthetic recall of a trained model: facts written into held-out text, asked later, guessed right or not.

Special here: a model trained on ordinary text was never taught the task, so near chance is the expected answer, and
says that recall was not learnt, not that the architecture cannot learn it. Chance and the number of questions are
reported beside every accuracy.

Shapes: `B` rows, `T` tokens, `D` needles per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from models.language_model import CausalLM
from pipelines.protocol import stream
from pipelines.recall import Recall, Symbols, facts, mqar

KEYS, VALUES = 32, 32
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PAIRS = {"mqar": 16, "facts": 4}
APART = (1, 2)  # chunks between telling a fact and asking it
CHUNK = 64  # tokens, for a model without text chunks
CHUNKS = 8  # per row of the task `facts`
SHORTEST = 64  # contexts below have no room for the tasks
TASK_TOKENS = 8192  # per task and context, roughly
ROWS = 4  # at least


def evaluate_recall(
    model: CausalLM, text: Tensor, separator: int, contexts: Sequence[int], chunk: int | None, batch_tokens: int
) -> dict[str, Any]:
    """Accuracies of MQAR and needles by context, and of facts by the number of chunks between telling and asking.

    Args:
        model: on the device to run on.
        text: `[R, N]` held-out tokens to write into, N the longest context; rows are used again when they are too few.
        separator: token that closes a document; never part of a task.
        contexts: lengths; those below 64 tokens are left out.
        chunk: tokens per text chunk of the model, if it has them.
        batch_tokens: tokens per call of the model, roughly.
    Returns:
        `chance`, `mqar {n: accuracy}`, `needle {n: {depth: accuracy}}`, `facts {chunks: accuracy}`, and under
        `questions` how many there were for each accuracy.
    """
    symbols = task_symbols(model.config.vocab_size, separator)
    results: dict[str, Any] = {"chance": 1 / VALUES, "mqar": {}, "needle": {}, "facts": {}}
    asked: dict[str, dict[str, int]] = {"mqar": {}, "needle": {}, "facts": {}}

    def background(length: int) -> Tensor:
        rows = torch.arange(max(ROWS, TASK_TOKENS // length)) % len(text)
        return without(text[rows, :length], symbols)

    generator = torch.Generator().manual_seed(0)
    for n in contexts:
        if n < SHORTEST:
            continue
        task = mqar(symbols, background(n), min(PAIRS["mqar"], n // 8), generator)
        right = answered(model, task, batch_tokens)
        results["mqar"][str(n)], asked["mqar"][str(n)] = _share(right), right.numel()
        right = answered(model, needles(symbols, background(n), DEPTHS, generator), batch_tokens).view(-1, len(DEPTHS))
        results["needle"][str(n)] = {f"{d:.2f}": _share(right[:, i]) for i, d in enumerate(DEPTHS)}
        asked["needle"][str(n)] = len(right)
    chunk = chunk or CHUNK
    length, pairs = min(CHUNKS, contexts[-1] // chunk) * chunk, min(PAIRS["facts"], chunk // 4)
    for apart in APART:
        if pairs and length > apart * chunk:
            task = facts(symbols, background(length), chunk, [apart], pairs, generator)[apart]
            right = answered(model, task, batch_tokens)
            results["facts"][str(apart)], asked["facts"][str(apart)] = _share(right), right.numel()
    return results | {"questions": asked}


def task_symbols(vocab_size: int, separator: int) -> Symbols:
    """Keys and values from the end of the vocabulary (rare in text); the separator is none of them, nor filler."""
    tokens = torch.cat((torch.arange(separator), torch.arange(separator + 1, vocab_size)))
    places = Symbols.from_vocabulary(vocab_size - 1, KEYS, VALUES)
    return Symbols(tokens[places.keys], tokens[places.values], tokens[places.filler])


def without(text: Tensor, symbols: Symbols) -> Tensor:
    """The text with its own keys and values replaced by a filler token, so that every question has one answer."""
    taken = torch.isin(text, torch.cat((symbols.keys, symbols.values)))
    return text.masked_fill(taken, int(symbols.filler[0]))


def needles(symbols: Symbols, background: Tensor, depths: Sequence[float], generator: torch.Generator) -> Recall:
    """A fact at each depth (0 the start, 1 just before the questions), all asked at the end in the order of `depths`.

    One pass asks about every depth: the same evidence as a row per needle at a fifth of the price.

    Args:
        background: `[B, T]`, T at least `8 * D`; answers come out as D per row.
        depths: D increasing numbers in [0, 1], at least `2 / (T - 2 D - 2)` apart.
    """
    rows, length = background.shape
    room = length - 2 * len(depths) - 2
    tokens, answers = background.clone(), torch.zeros_like(background, dtype=torch.bool)
    order = torch.rand(rows, len(symbols.keys), generator=generator).argsort(1)
    for place, depth in enumerate(depths):
        value = torch.randint(len(symbols.values), (rows,), generator=generator)
        fact = torch.stack((symbols.keys[order[:, place]], symbols.values[value]), dim=1)
        for start in (round(depth * room), room + 2 + 2 * place):
            tokens[:, start : start + 2] = fact
        answers[:, room + 3 + 2 * place] = True
    return Recall(tokens, answers, symbols.values)


def answered(model: CausalLM, task: Recall, batch_tokens: int) -> Tensor:
    """Whether each answer leads the other values, in the order of `task.tokens[task.answers]`; memory is bounded."""
    device = next(model.parameters()).device
    values, asked = task.values.to(device), task.answers[:, 1:]
    rows = max(1, min(len(task.tokens), batch_tokens // task.tokens.shape[1]))
    scores = []
    with torch.inference_mode():
        for part in task.tokens[:, :-1].split(rows):
            parts = stream(model, part.to(device), max(1, batch_tokens // len(part)))
            scores.append(torch.cat([logits[..., values].float().cpu() for logits, _ in parts], dim=1))
    guesses = task.values[torch.cat(scores)[asked].argmax(-1)]
    return guesses == task.tokens[:, 1:][asked]


def _share(right: Tensor) -> float:
    return right.double().mean().item()
