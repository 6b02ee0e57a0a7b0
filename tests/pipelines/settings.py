"""A pipeline configuration for tests: what `params.yaml` says, with some fields changed."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from models.configuration import config_from
from models.language_model import ModelConfig
from pipelines.config import PipelineConfig

PARAMS = Path(__file__).parents[2] / "params.yaml"


def settings(**changes: Any) -> PipelineConfig:
    """`settings(data={"tokenizer": "bytes"}, seed=1)`: sections are merged, other fields replaced."""
    nothing = {"models": {}, "students": {}, "model_name": "none", "model": ModelConfig()}
    values = yaml.safe_load(PARAMS.read_text("utf-8")) | nothing
    for name, value in changes.items():
        values[name] = values[name] | value if isinstance(value, dict) else value
    return config_from(PipelineConfig, {field.name: values[field.name] for field in fields(PipelineConfig)})
