"""The evaluation protocol: which held-out text is scored, with how much context, and what is reported.

Special here:
- a *window* is N + 1 consecutive tokens of one held-out document (N the longest context): N inputs and the N tokens
  that follow them, so every context length n is asked about the same N targets;
- at length n a window is cut into N / n pieces, each read from an empty state. `window_mean` (the papers') averages
  over every target; `fixed_targets` (ours) over the last `score_tokens` of each window, whose piece is the one that
  ends with the window at every n. One pass per n therefore gives both;
- memory is bounded: what does not fit one `forward` is streamed through `extend`, which gives the same logits.

Shapes: `R` windows, `N` targets per window, `n` context length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from models.configuration import require
from models.language_model import CausalLM
from pipelines.config import StageError

PROTOCOLS = ("window_mean", "fixed_targets")


@dataclass(frozen=True)
class Window:
    """`N + 1` tokens of held-out document `document`, from token `start` of it."""

    document: int
    start: int


@dataclass(frozen=True)
class Summary:
    """Losses of one selection of targets. `loss_sum` in nats, `byte_count` of the targets' UTF-8 text."""

    tokens: int
    loss_sum: float
    byte_count: int = 0

    @property
    def perplexity(self) -> float:
        """`exp` of the mean loss; a mean beyond 700 nats is reported as exp(700), the largest a float holds."""
        return math.exp(min(self.loss_sum / self.tokens, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Bits the model needs per byte of the scored text: comparable across tokenizers."""
        return self.loss_sum / math.log(2) / self.byte_count


def choose_windows(lengths: Sequence[int], longest: int, limit: int) -> list[Window]:
    """Up to `limit` disjoint windows of `longest` tokens, evenly over documents.

    Documents at least `longest` tokens long take part; when they outnumber `limit`, evenly spaced ones among them.
    Windows are handed out one per document and round, so a long document gets its second only after every other has
    its first; inside a document they are evenly spaced. Ordered by round: neighbours come from different documents.

    Args:
        lengths: tokens of each held-out document, its closing separator not counted (as a target it may be).
    Raises:
        ConfigError: when no document is long enough.
    """
    room = {document: length // longest for document, length in enumerate(lengths) if length >= longest}
    require(
        bool(room),
        f"evaluate.contexts: no held-out document has {longest} tokens; the longest has {max(lengths, default=0)}",
    )
    quota = dict.fromkeys(_evenly(list(room), limit), 0)
    while unfilled := [document for document in quota if quota[document] < room[document]]:
        spare = limit - sum(quota.values())
        if spare == 0:
            break
        for document in _evenly(unfilled, spare):
            quota[document] += 1
    rounds = [
        (turn, document, place)
        for document, count in quota.items()
        for turn, place in enumerate(_evenly(range(room[document]), count))
    ]
    return [Window(document, place * longest) for _, document, place in sorted(rounds)]


def score(
    model: CausalLM,
    windows: Tensor,
    context: int,
    batch_tokens: int,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Tensor:
    """Next-token losses of every target of every window, each piece of `context` tokens read from an empty state.

    Batches are filled with the same piece of different windows and never hold a single row where two would do: the
    control `shuffle` needs another document's memory to hand over.

    Args:
        windows: `[R, N + 1]` tokens; `context` divides N.
        batch_tokens: tokens per call of the model, roughly; longer pieces are streamed in slices.
        advance: told the number of tokens scored, for a progress bar.
    Returns:
        `[R, N]` losses in nats, fp32, on the CPU.
    Raises:
        StageError: when a loss is not finite.
    """
    count, longest = windows.shape[0], windows.shape[1] - 1
    assert longest % context == 0, f"context={context} must divide {longest}"
    inputs, targets = (_pieces(part, context) for part in (windows[:, :-1], windows[:, 1:]))  # [N/n * R, n]
    pairs = max(1, len(inputs) // 2)
    batches = min(pairs, math.ceil(len(inputs) * context / batch_tokens))
    losses = []
    for batch in torch.arange(len(inputs)).tensor_split(batches):
        losses.append(_losses(model, inputs[batch], targets[batch], batch_tokens))
        if not losses[-1].isfinite().all():
            raise StageError(f"the loss is not finite at context {context} (control {model.control}): weights broken?")
        advance(losses[-1].numel())
    return torch.cat(losses).view(longest // context, count, context).transpose(0, 1).reshape(count, longest)


def stream(model: CausalLM, tokens: Tensor, slice_tokens: int) -> Iterator[tuple[Tensor, object]]:
    """Run `tokens [B, T]` through `extend` in slices; yields `(logits [B, t, V], state)` after each.

    The state is consumed by the next slice: read it before advancing. Slices hold whole grains of the model.
    """
    state = model.init_state(tokens.shape[0])
    for part in tokens.split(max(1, slice_tokens // model.grain) * model.grain, dim=1):
        logits, state = model.extend(part, state)
        yield logits, state


@contextmanager
def controlled(model: CausalLM, control: str) -> Iterator[None]:
    """The model under an evaluation-time control, in evaluation mode; both are put back afterwards."""
    before, training = model.control, model.training
    model.set_control(control)
    model.eval()
    try:
        yield
    finally:
        model.set_control(before)
        model.train(training)


def summarise(losses: Tensor, byte_counts: Tensor | None = None) -> Summary:
    """Sum `losses` (any shape) in fp64, with the bytes of the same targets."""
    total = losses.double().sum().item()
    return Summary(losses.numel(), total, 0 if byte_counts is None else int(byte_counts.sum()))


def select(protocol: str, values: Tensor, score_tokens: int) -> Tensor:
    """The columns of `values [R, N]` a protocol averages over."""
    return {"window_mean": values, "fixed_targets": values[:, -score_tokens:]}[protocol]


def by_position(losses: Tensor, context: int) -> list[tuple[int, int, Summary]]:
    """Losses by position in the piece: `(first, last + 1, summary)` of positions 0, 1, 2-3, 4-7, ... to `context`."""
    edges = [0, *(2**power for power in range(math.ceil(math.log2(context)))), context]
    return _bucketed(losses.reshape(-1, context), edges)


def by_chunk_position(losses: Tensor, context: int, chunk: int) -> list[tuple[int, int, Summary]]:
    """Losses by position inside a text chunk of `chunk` tokens, in at most 16 equal buckets.

    Pieces start at a chunk boundary; a last chunk that `context` cuts short is left out.
    """
    whole = losses.reshape(-1, context)[:, : context // chunk * chunk]
    buckets = min(chunk, 16)
    return _bucketed(whole.reshape(-1, chunk), [bucket * chunk // buckets for bucket in range(buckets + 1)])


def by_document(losses: Tensor, windows: Sequence[Window]) -> Mapping[int, Summary]:
    """Losses `[R, t]` of each document that has a window, in the order of the corpus."""
    owners = torch.tensor([window.document for window in windows])
    return {document: summarise(losses[owners == document]) for document in sorted(set(owners.tolist()))}


def _losses(model: CausalLM, inputs: Tensor, targets: Tensor, batch_tokens: int) -> Tensor:
    """`[b, n]` losses of one batch, by `forward` where the batch is small enough, else streamed."""
    device = next(model.parameters()).device
    inputs, targets = inputs.to(device), targets.to(device)
    slice_tokens = max(1, batch_tokens // len(inputs))
    with torch.inference_mode():
        if inputs.shape[1] <= slice_tokens:
            return _cross_entropy(model(inputs), targets)
        losses, start = [], 0
        for logits, _ in stream(model, inputs, slice_tokens):
            end = start + logits.shape[1]
            losses.append(_cross_entropy(logits, targets[:, start:end]))
            start = end
        return torch.cat(losses, dim=1)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    losses = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return losses.view(targets.shape).cpu()


def _pieces(tokens: Tensor, context: int) -> Tensor:
    """`[R, N] -> [N/n * R, n]`, the first piece of every window first."""
    return tokens.reshape(len(tokens), -1, context).transpose(0, 1).reshape(-1, context)


def _bucketed(losses: Tensor, edges: list[int]) -> list[tuple[int, int, Summary]]:
    return [(start, end, summarise(losses[:, start:end])) for start, end in pairwise(edges) if end > start]


def _evenly(items: Sequence[int], count: int) -> list[int]:
    """`count` of the items (all, if there are fewer), evenly spaced, clear of both ends."""
    count = min(count, len(items))
    return [items[(2 * index + 1) * len(items) // (2 * count)] for index in range(count)]
