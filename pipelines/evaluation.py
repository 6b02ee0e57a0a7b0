"""The numbers of one evaluated model, from its weights and the held-out documents; the stage writes them down.

Special here:
- the weights are scored under every evaluation-time control on the same windows, so that what the memory does can be
  told, document by document, from what local attention does. To halve their cost, the controls have `window_mean` at
  the longest context only: `fixed_targets` need just the piece that ends the window;
- a model whose state stays small is also streamed through one whole document, far beyond the longest window.

Shapes: `R` windows, `N` targets per window, `n` context length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.configuration import require
from models.language_model import CausalLM, ModelConfig
from pipelines.config import EvaluateConfig
from pipelines.protocol import (
    PROTOCOLS,
    Summary,
    Window,
    by_chunk_position,
    by_document,
    by_position,
    choose_windows,
    controlled,
    score,
    select,
    summarise,
)

STREAMED = 8  # the streamed document is read up to this many times the longest context

Row = dict[str, Any]


@dataclass(frozen=True)
class HeldOut:
    """Held-out text as the protocol needs it."""

    documents: Sequence[np.ndarray]  # tokens of each document, its closing separator last
    token_bytes: np.ndarray  # [V] how many bytes of UTF-8 each token stands for

    def choose(self, longest: int, limit: int) -> list[Window]:
        """The windows to score; see `choose_windows`."""
        return choose_windows([len(document) - 1 for document in self.documents], longest, limit)

    def tokens(self, window: Window, length: int) -> Tensor:
        """`[length + 1]` tokens from the start of `window`."""
        text = self.documents[window.document][window.start : window.start + length + 1]
        return torch.from_numpy(np.asarray(text, dtype=np.int64))

    def longest(self, limit: int) -> Tensor:
        """`[1, T + 1]`: the longest document from its start, at most `limit` + 1 tokens of it."""
        document = max(range(len(self.documents)), key=lambda each: len(self.documents[each]))
        return self.tokens(Window(document, 0), limit)[None]

    def byte_counts(self, tokens: Tensor) -> Tensor:
        """UTF-8 bytes of each token, in the shape of `tokens`."""
        return torch.from_numpy(self.token_bytes)[tokens]


@dataclass(frozen=True)
class Evaluation:
    """Losses of every target under every control and context, and the tables made of them."""

    windows: Sequence[Window]
    tokens: Tensor  # [R, N + 1]
    byte_counts: Tensor  # [R, N] UTF-8 bytes of each target
    losses: dict[str, dict[int, Tensor]]  # control -> n -> [R, N] nats; [R, n] where only the last piece was scored
    streamed: Tensor | None  # [1, T] nats: one document in one stream; none for a state that grows with the context
    score_tokens: int
    chunk: int | None  # tokens per text chunk, for a model that has them

    def selections(self) -> Iterator[tuple[str, str, int, Tensor]]:
        """Control, protocol, context, and the losses `[R, t]` of the targets which that protocol averages over."""
        for control, by_context in self.losses.items():
            for protocol in PROTOCOLS:
                for n, losses in by_context.items():
                    if protocol == "fixed_targets" or losses.shape == self.byte_counts.shape:
                        yield control, protocol, n, select(protocol, losses, self.score_tokens)

    def metrics(self) -> dict[str, Any]:
        """The perplexities and bits per byte of `metrics.json`; bits per byte over every target (`window_mean`)."""
        values: dict[str, Any] = {protocol: {control: {} for control in self.losses} for protocol in PROTOCOLS}
        for control, protocol, n, losses in self.selections():
            values[protocol][control][str(n)] = summarise(losses).perplexity
        on = self.losses["on"].items()
        values["bits_per_byte"] = {str(n): summarise(losses, self.byte_counts).bits_per_byte for n, losses in on}
        if self.streamed is not None:
            values["streaming"] = {"tokens": self.streamed.numel(), "perplexity": summarise(self.streamed).perplexity}
        values["windows"] = {
            "count": len(self.windows),
            "documents": len({window.document for window in self.windows}),
            "tokens": self.byte_counts.numel(),
            "score_tokens": self.score_tokens * len(self.windows),
        }
        return values

    def context_rows(self) -> list[Row]:
        """A row per context; a perplexity per protocol, and per protocol and control, in columns: ready to plot."""
        rows: dict[int, Row] = {}
        for control, protocol, n, losses in self.selections():
            column = protocol if control == "on" else f"{protocol}_{control}"
            rows.setdefault(n, {"context": n})[column] = summarise(losses).perplexity
        return list(rows.values())

    def document_rows(self) -> list[Row]:
        """Loss and tokens of every document, per control, protocol and context."""
        return [
            {
                "document": document,
                "context": n,
                "protocol": protocol,
                "control": control,
                "tokens": part.tokens,
                "loss_sum": part.loss_sum,
            }
            for control, protocol, n, losses in self.selections()
            for document, part in by_document(losses, self.windows).items()
        ]

    def position_rows(self) -> list[Row]:
        """Perplexity by position in a piece of the longest context, in a text chunk, and in the streamed document."""
        rows = []
        for control, by_context in self.losses.items():
            longest, losses = max(by_context.items())
            rows += _position_rows(control, longest, "position", by_position(losses, longest))
            if self.chunk is not None and self.chunk <= longest:
                rows += _position_rows(control, longest, "chunk", by_chunk_position(losses, longest, self.chunk))
        if self.streamed is not None:
            length = self.streamed.shape[1]
            rows += _position_rows("on", length, "stream", by_position(self.streamed, length))
        return rows


def evaluate_model(
    model: CausalLM,
    text: HeldOut,
    config: EvaluateConfig,
    batch_tokens: int,
    progress: Callable[[int, int], None] = lambda scored, total: None,
) -> Evaluation:
    """Score a model under its controls at every context length.

    Args:
        model: on the device to run on.
        text: held-out documents in the model's tokens.
        batch_tokens: tokens per call of the model, roughly.
        progress: told how many tokens were scored since the last call, and how many there are in all.
    Raises:
        ConfigError: when no document is long enough, or a control needs two windows and there is one.
        StageError: when a loss is not finite.
    """
    longest = config.contexts[-1]
    windows = text.choose(longest, config.windows)
    controls = model.controls if config.controls else model.controls[:1]
    require(
        "shuffle" not in controls or len(windows) > 1,
        "evaluate.controls: shuffle needs two windows and the held-out text gives one; lower evaluate.contexts, raise "
        "evaluate.windows, or set evaluate.controls=false",
    )
    tokens = torch.stack([text.tokens(window, longest) for window in windows])
    stream = text.longest(STREAMED * longest) if _keeps_small(model, longest) else None
    pieces = {  # (control, n) -> [R, _ + 1]
        (control, n): tokens if control == "on" else tokens[:, -(n + 1) :]
        for control in controls
        for n in config.contexts
    }
    total = sum(part[:, 1:].numel() for part in (*pieces.values(), *([] if stream is None else [stream])))

    def advance(scored: int) -> None:
        progress(scored, total)

    losses: dict[str, dict[int, Tensor]] = {control: {} for control in controls}
    for (control, n), part in pieces.items():
        with controlled(model, control):
            losses[control][n] = score(model, part, n, batch_tokens, advance)
    with controlled(model, "on"):
        streamed = None if stream is None else score(model, stream, stream.numel() - 1, batch_tokens, advance)
    return Evaluation(
        windows=windows,
        tokens=tokens,
        byte_counts=text.byte_counts(tokens[:, 1:]),
        losses=losses,
        streamed=streamed,
        score_tokens=config.score_tokens,
        chunk=_text_chunk(model.config),
    )


def _text_chunk(config: ModelConfig) -> int | None:
    """Tokens whose attention crosses no chunk border; MELT's chunks are how it trains, not what its tokens see."""
    local = {"mela": "text_chunk", "transformer": "chunk"}
    return getattr(config, local[config.family]) if config.family in local else None


def _keeps_small(model: CausalLM, context: int) -> bool:
    """Whether the streaming state does not grow with the context (an unfinished chunk aside)."""
    return model.cost(64 * context).state_bytes <= 8 * model.cost(context).state_bytes


def _position_rows(control: str, context: int, kind: str, buckets: list[tuple[int, int, Summary]]) -> list[Row]:
    return [
        {
            "control": control,
            "context": context,
            "kind": kind,
            "start": start,
            "end": end,
            "tokens": part.tokens,
            "perplexity": part.perplexity,
        }
        for start, end, part in buckets
    ]
