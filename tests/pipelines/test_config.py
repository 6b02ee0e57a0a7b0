"""The typed configuration: what `params.yaml` says is accepted, and what cannot work is refused by name."""

from __future__ import annotations

import pytest

from models.configuration import ConfigError
from tests.pipelines.settings import settings


def test_the_params_file_fits_the_types():
    config = settings()
    assert config.pretrain.steps == config.pretrain.tokens // (config.pretrain.context * config.pretrain.batch_size)
    assert config.pretrain.betas == (0.9, 0.95)


def test_a_budget_pays_for_whole_steps():
    assert settings(pretrain={"context": 8, "batch_size": 4, "tokens": 32}).pretrain.steps == 1
    assert settings(pretrain={"context": 8, "batch_size": 4, "tokens": 95}).pretrain.steps == 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"data": {"held_out": 1.0}}, "data.held_out=1.0"),
        ({"data": {"corpus": "files", "paths": []}}, "data.paths"),
        ({"data": {"corpus": "wikipedia"}}, "data.corpus='wikipedia'"),
        ({"data": {"vocab_size": 256}}, "data.vocab_size=256"),
        ({"data": {"documents": 1}}, "data.documents=1"),
        ({"pretrain": {"context": 0}}, "pretrain.context=0"),
        ({"pretrain": {"accumulate": 3}}, "pretrain.accumulate=3"),
        ({"pretrain": {"tokens": 100}}, "pretrain.tokens=100"),
        ({"pretrain": {"lr": 0}}, "pretrain.lr=0.0"),
        ({"pretrain": {"warmup": 1.5}}, "pretrain.warmup=1.5"),
        ({"pretrain": {"betas": [0.9]}}, "pretrain.betas=[0.9]"),
        ({"pretrain": {"betas": [0.9, 1]}}, "pretrain.betas=[0.9, 1.0]"),
        ({"pretrain": {"weight_decay": -0.1}}, "pretrain.weight_decay=-0.1"),
        ({"pretrain": {"validation_tokens": 1}}, "pretrain.validation_tokens=1"),
        ({"evaluate": {"contexts": []}}, "evaluate.contexts=[]"),
        ({"evaluate": {"contexts": [1024, 512]}}, "evaluate.contexts=[1024, 512]"),
        ({"evaluate": {"contexts": [512, 768]}}, "evaluate.contexts=[512, 768]"),
        ({"evaluate": {"score_tokens": 4096}}, "evaluate.score_tokens=4096"),
        ({"execution": {"threads": 0}}, "execution.threads=0"),
        ({"execution": {"precision": "fp8"}}, "execution.precision='fp8'"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes, named):
    with pytest.raises(ConfigError) as refused:
        settings(**changes)
    assert str(refused.value).startswith(named)
