"""Recall of a model that looks facts up, of one that forgets them, and where the needles lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from models.language_model import CausalLM, Cost, ModelConfig
from pipelines.recall import Symbols, mqar
from pipelines.recall_evaluation import DEPTHS, answered, evaluate_recall, needles, task_symbols, without

VOCAB, SEPARATOR = 120, 2


@dataclass
class History:
    """The state of `Lookup`: every token read."""

    tokens: Tensor

    def tensors(self) -> Iterator[Tensor]:
        yield self.tokens


class Lookup(CausalLM):
    """Expects what followed the current token when it was last read, at most `reach` tokens ago."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.config = ModelConfig(vocab_size=VOCAB, width=1)
        self.anchor = nn.Parameter(torch.zeros(()))
        self.reach = reach

    def forward(self, tokens: Tensor) -> Tensor:
        return self.extend(tokens, self.init_state(len(tokens)))[0]

    def init_state(self, batch_size: int) -> History:
        return History(torch.zeros(batch_size, 0, dtype=torch.long))

    def extend(self, tokens: Tensor, state: History) -> tuple[Tensor, History]:
        seen = torch.cat((state.tokens, tokens), dim=1)
        position = torch.arange(seen.shape[1])
        age = position[:, None] - position
        same = (seen[:, :, None] == seen[:, None]) & (age > 0) & (age <= self.reach)
        last = torch.where(same, position, -1).amax(2)
        follower = seen.gather(1, (last + 1).clamp(min=0))
        logits = functional.one_hot(follower, VOCAB) * (last >= 0)[..., None]
        return self.anchor + logits[:, state.tokens.shape[1] :].float(), History(seen)

    def cost(self, context: int) -> Cost:
        raise AssertionError("not asked for")


TEXT = torch.randint(VOCAB, (3, 256), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("batch_tokens", [50, 5000])
def test_a_model_that_looks_facts_up_answers_everything(batch_tokens: int) -> None:
    results = evaluate_recall(Lookup(reach=256), TEXT, SEPARATOR, (16, 64, 256), 32, batch_tokens)
    assert results["chance"] == 1 / 32
    assert results["mqar"] == {"64": 1.0, "256": 1.0}
    assert results["needle"] == {
        n: {"0.00": 1.0, "0.25": 1.0, "0.50": 1.0, "0.75": 1.0, "1.00": 1.0} for n in ("64", "256")
    }
    assert results["facts"] == {"1": 1.0, "2": 1.0}
    assert results["questions"] == {
        "mqar": {"64": 128 * 8, "256": 32 * 16},
        "needle": {"64": 128, "256": 32},
        "facts": {"1": 32 * 7 * 4, "2": 32 * 6 * 4},
    }


def test_a_model_that_forgets_is_at_chance_beyond_its_reach() -> None:
    results = evaluate_recall(Lookup(reach=40), TEXT, SEPARATOR, (256,), 32, 5000)
    assert results["needle"]["256"]["1.00"] == 1
    assert results["needle"]["256"]["0.00"] < 0.25
    assert results["facts"]["1"] == 1
    assert results["facts"]["2"] < 0.1


def test_evaluations_repeat() -> None:
    first, second = (evaluate_recall(Lookup(reach=40), TEXT, SEPARATOR, (64,), None, 5000) for _ in range(2))
    assert first == second
    assert list(first["facts"]) == []  # one chunk of 64 tokens has no chunk before it


def test_needles_lie_at_their_depth_and_are_asked_at_the_end() -> None:
    symbols = task_symbols(VOCAB, SEPARATOR)
    background = torch.full((2, 100), 5)
    task = needles(symbols, background, DEPTHS, torch.Generator().manual_seed(0))
    starts = [0, 22, 44, 66, 88]
    for row in task.tokens:
        told = [row[start : start + 2].tolist() for start in starts]
        assert row[90:].view(5, 2).tolist() == told
        assert len({key for key, _ in told}) == 5
        assert {int(token) for token in row[:90]} - {5} == {token for fact in told for token in fact}
    assert task.answers.nonzero()[:, 1].tolist() == [91, 93, 95, 97, 99] * 2
    assert torch.isin(task.tokens[task.answers], symbols.values).all()


def test_symbols_are_disjoint_and_text_is_cleared_of_them() -> None:
    symbols = task_symbols(VOCAB, SEPARATOR)
    everything = torch.cat((symbols.keys, symbols.values, symbols.filler)).tolist()
    assert sorted([*everything, SEPARATOR]) == list(range(VOCAB))
    cleared = without(TEXT, symbols)
    kept = ~torch.isin(TEXT, torch.cat((symbols.keys, symbols.values)))
    assert torch.equal(cleared[kept], TEXT[kept])
    assert set(cleared[~kept].tolist()) == {0}


def test_answers_are_judged_as_by_the_generator() -> None:
    symbols = Symbols.from_vocabulary(VOCAB, 16, 16)
    generator = torch.Generator().manual_seed(3)
    task = mqar(symbols, symbols.background(6, 80, generator), 8, generator)
    model = Lookup(reach=30)
    assert 0 < task.accuracy(model(task.tokens)) < 1
    assert answered(model, task, 100).double().mean().item() == task.accuracy(model(task.tokens))
