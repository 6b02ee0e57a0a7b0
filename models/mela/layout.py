"""Where everything sits: which tokens, patches and chunks meet. Integers only.

Patch p holds tokens `p P .. p P + P - 1` and ends with the last of them; text chunk c starts at token `c W`; memory
chunk c holds patches `c C .. c C + C - 1`. `C * P` need not equal `W`.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.mela.config import MelaConfig


@dataclass(frozen=True)
class Piece:
    """`chunks` equal stretches of `length` tokens, at the same place in consecutive text chunks."""

    start: int  # position of the first token
    length: int
    chunks: int = 1

    @property
    def tokens(self) -> int:
        return self.chunks * self.length


def pieces(config: MelaConfig, begin: int, end: int) -> list[Piece]:
    """Tokens `begin .. end - 1`: the rest of a chunk under way, whole chunks, and the beginning of another."""
    chunk = config.text_chunk
    under_way = min(-begin % chunk, end - begin)
    whole, rest = divmod(end - begin - under_way, chunk)
    parts = [Piece(begin, under_way), Piece(begin + under_way, chunk, whole), Piece(end - rest, rest)]
    return [piece for piece in parts if piece.tokens]


def memory_span(config: MelaConfig, piece: Piece) -> tuple[int, int]:
    """Patches `lower .. upper - 1` whose states the first chunk of the piece adds to its memory rows.

    A chunk starts with the M patches that end before it (negative numbers: before the text); in the causal view it goes
    on with those that end inside the piece.
    """
    if config.memory == "none":
        return 0, 0
    complete = piece.start // config.patch_size
    opening = piece.start % config.text_chunk == 0
    lower = complete - config.memory_tokens if opening else complete
    causal = config.memory_view == "causal"
    return lower, (piece.start + piece.length) // config.patch_size if causal else complete


def positions(config: MelaConfig, piece: Piece) -> list[int]:
    """Positions inside the chunk of the memory rows and of the text of a piece."""
    before = config.memory_tokens if config.memory == "on" else 0
    first, offset = divmod(piece.start, config.text_chunk)
    first = first * config.text_chunk // config.patch_size  # the first patch of the chunk
    memory = (
        before + (patch - first if patch < first else (patch - first + 1) * config.patch_size - 1)
        for patch in range(*memory_span(config, piece))
    )
    return [*memory, *range(before + offset, before + offset + piece.length)]


def memory_rows(config: MelaConfig, text: int) -> int:
    """Memory rows beside the first `text` tokens of a chunk."""
    lower, upper = memory_span(config, Piece(0, text))
    return upper - lower


def patches_read(config: MelaConfig, length: int) -> int:
    """Patches of a text of `length` tokens that any of them can see."""
    if config.memory == "none":
        return 0
    seen = length if config.memory_view == "causal" else (length - 1) // config.text_chunk * config.text_chunk
    return seen // config.patch_size


def chunks_written(config: MelaConfig, patches: int) -> int:
    """Memory chunks among `patches` that a later one of them reads: all but the last."""
    return max(0, -(-patches // config.memory_chunk) - 1)


def least_context(config: MelaConfig) -> int:
    """Tokens of the shortest text that reads a patch and, with neural memory, one that saw a written chunk."""
    if config.memory == "none":
        return 1
    tokens = (config.memory_chunk + 1 if config.neural_memory else 1) * config.patch_size
    return tokens if config.memory_view == "causal" else -(-tokens // config.text_chunk) * config.text_chunk + 1


def patch_capacity(config: MelaConfig) -> int:
    """Most patches a streaming state holds back: an unfinished memory chunk, and what no text chunk asked for yet."""
    waiting = config.text_chunk // config.patch_size if config.memory_view == "previous" else 0
    return config.memory_chunk - 1 + waiting
