"""The memory works: a tiny model learns to bring back facts that only its memory can carry.

32 values, so guessing is right in 3 % of the cases. Text chunks of 32 tokens tell 4 facts each; a question one chunk
later can be answered from the patches of the chunk before, one two chunks later from the neural memory alone.
"""

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch.nn import functional

from models import build_model
from models.language_model import CausalLM
from models.mela.config import MelaConfig
from pipelines.recall import Recall, Symbols, facts

SYMBOLS = Symbols.from_vocabulary(65, keys=32, values=32)
CHANCE = 0.10  # at most: 3 % expected, over a few hundred questions
CONFIG = {
    "vocab_size": 65,
    "width": 64,
    "patch_size": 4,
    "text_chunk": 32,
    "h_cycles": 2,
    "l_cycles": 1,
    "h_blocks": 1,
    "memory_heads": 4,
    "decoder_layers": 2,
    "hidden": 128,
}


def told(apart: Sequence[int], rows: int, chunks: int, generator: torch.Generator) -> Recall:
    """Facts asked `apart` chunks later; the answers are those at the largest distance."""
    background = SYMBOLS.background(rows, chunks * 32, generator)
    return facts(SYMBOLS, background, chunk=32, apart=apart, pairs=4, generator=generator)[max(apart)]


@cache
def trained(apart: tuple[int, ...], chunks: int, steps: int, memory: str = "on") -> CausalLM:
    """A model trained on the answers alone, always on new facts; 3,072 tokens a step."""
    model = build_model(MelaConfig(**CONFIG, memory=memory), seed=0)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, (s + 1) / 50) * (1 - 0.9 * s / steps))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        task = told(apart, 96 // chunks, chunks, generator)
        asked = task.answers[:, 1:]
        loss = functional.cross_entropy(model(task.tokens)[:, :-1][asked], task.tokens[:, 1:][asked])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


@torch.inference_mode()
def accuracies(model: CausalLM, apart: Sequence[int], chunks: int) -> dict[str, float]:
    """Share of right answers to questions never seen before, under each control."""
    task = told(apart, 384 // chunks, chunks, torch.Generator().manual_seed(1))
    result = {}
    for control in model.controls:
        model.set_control(control)
        result[control] = task.accuracy(model(task.tokens))
    model.set_control("on")
    return result


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [6, 24])
def test_facts_of_the_chunk_before(chunks):
    """Trained on six chunks, with rehearsal: in texts four times as long it does as well."""
    found = accuracies(trained((0, 1), chunks=6, steps=300), (0, 1), chunks)
    assert found["on"] >= 0.90, found
    assert max(found["zero"], found["shuffle"]) <= CHANCE, found


@pytest.mark.slow
def test_facts_of_two_chunks_before_come_through_the_neural_memory():
    """No rehearsal, and nothing of the facts in the patches that the memory tokens stand for."""
    found = accuracies(trained((2,), chunks=3, steps=600), (2,), chunks=3)
    assert found["on"] >= 0.40, found
    assert max(found["zero"], found["shuffle"], found["reset"]) <= CHANCE, found


@pytest.mark.slow
@pytest.mark.parametrize("apart", [(0, 1), (2,)])
def test_without_a_memory_answers_are_guesses(apart):
    found = accuracies(trained(apart, chunks=3, steps=100, memory="none"), apart, chunks=3)
    assert found["on"] <= CHANCE, found
