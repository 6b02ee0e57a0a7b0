import pytest
import torch

from pipelines.recall import Symbols, facts, mqar, needle


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def symbols(keys: int = 12, values: int = 5) -> Symbols:
    return Symbols.from_vocabulary(30, keys, values)


def exact_logits(tokens: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Logits that put every token first where `right`, and the token after it elsewhere."""
    predicted = torch.where(right, tokens, (tokens + 1) % 30)
    return torch.nn.functional.one_hot(predicted, 30).float().roll(-1, dims=1)


def test_symbols_are_disjoint_and_fill_the_vocabulary():
    s = symbols()
    assert sorted(torch.cat((s.filler, s.keys, s.values)).tolist()) == list(range(30))
    with pytest.raises(ValueError, match="vocab_size=17"):
        Symbols.from_vocabulary(17, 12, 5)


def test_facts_are_asked_as_many_chunks_later_as_said():
    s = symbols()
    tasks = facts(s, s.background(3, 5 * 20, generator()), chunk=20, apart=[0, 1, 3], pairs=2, generator=generator())
    for distance, task in tasks.items():
        assert task.answers.sum(1).tolist() == [2 * (5 - distance)] * 3
        for row in range(3):
            for place in task.answers[row].nonzero().flatten().tolist():
                key, value = task.tokens[row, place - 1 : place + 1].tolist()
                told = [
                    at // 20
                    for at in range(place - 1)
                    if task.tokens[row, at : at + 2].tolist() == [key, value] and not task.answers[row, at + 1]
                ]
                assert place // 20 - distance in told


def test_a_question_has_one_answer():
    """Between telling and asking, the key is followed by no other value."""
    s = symbols(keys=9)
    tasks = facts(s, s.background(4, 8 * 12, generator()), chunk=12, apart=[2], pairs=3, generator=generator())
    tokens, answers = tasks[2].tokens, tasks[2].answers
    for row, place in answers.nonzero().tolist():
        start = (place // 12 - 2) * 12 + 6
        same = (tokens[row, start : place - 1] == tokens[row, place - 1]).nonzero().flatten()
        assert set(tokens[row, start + same + 1].tolist()) == {int(tokens[row, place])}


def test_mqar_asks_every_fact_once():
    s = symbols()
    task = mqar(s, s.background(4, 40, generator()), pairs=6, generator=generator())
    told = task.tokens[:, :12].view(4, 6, 2)
    assert task.answers.sum(1).tolist() == [6] * 4
    for row in range(4):
        places = task.answers[row].nonzero().flatten()
        asked = torch.stack((task.tokens[row, places - 1], task.tokens[row, places]), dim=1)
        assert places.min() >= 13
        assert sorted(asked.tolist()) == sorted(told[row].tolist())


@pytest.mark.parametrize(("depth", "place"), [(0.0, 0), (0.5, 8), (1.0, 16)])
def test_the_needle_lies_at_its_depth(depth, place):
    s = symbols()
    task = needle(s, s.background(2, 20, generator()), depth, generator())
    assert torch.equal(task.tokens[:, place : place + 2], task.tokens[:, -2:])
    assert task.answers.nonzero()[:, 1].tolist() == [19, 19]
    assert torch.isin(task.tokens[:, -1], s.values).all()


def test_accuracy_counts_answers_among_the_values():
    s = symbols()
    task = mqar(s, s.background(4, 40, generator()), pairs=6, generator=generator())
    assert task.accuracy(exact_logits(task.tokens, torch.ones_like(task.answers))) == 1.0
    half = torch.arange(4)[:, None] < 2
    wrong = exact_logits(task.tokens, half.expand_as(task.tokens))
    wrong[:, :, s.filler] = 9.0  # a filler token is no answer: it does not compete
    assert task.accuracy(wrong) == pytest.approx(0.5, abs=0.25)
    assert task.accuracy(exact_logits(task.tokens, half.expand_as(task.tokens))) < 0.75


def test_impossible_tasks_are_refused():
    s = symbols()
    background = s.background(2, 40, generator())
    with pytest.raises(ValueError, match="chunks of at least 16 tokens"):
        facts(s, background, chunk=10, apart=[1], pairs=4, generator=generator())
    with pytest.raises(ValueError, match="at least 20 keys"):
        facts(s, background, chunk=20, apart=[4], pairs=4, generator=generator())
    with pytest.raises(ValueError, match="pairs=11"):
        mqar(s, background, pairs=11, generator=generator())
    with pytest.raises(ValueError, match="a depth in"):
        needle(s, background, 1.5, generator())
