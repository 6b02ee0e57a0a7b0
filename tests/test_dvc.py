"""`dvc.yaml` against the code: what a stage depends on is what it runs."""

from __future__ import annotations

import re

import pytest
import yaml

from models.families import FAMILIES
from models.presets import PRESETS
from pipelines.identity import PACKAGES, PROJECT, import_closure
from pipelines.sweep_file import read_sweep

STAGES = yaml.safe_load((PROJECT / "dvc.yaml").read_text("utf-8"))
PARAMS = yaml.safe_load((PROJECT / "params.yaml").read_text("utf-8"))
PRETRAINED, DISTILLED = ({FAMILIES[PRESETS[name][0]] for name in PARAMS[each]} for each in ("models", "students"))
PAIR = {FAMILIES["looplm"], FAMILIES["melt"]}
RUN = {  # stage -> the modules it runs, families apart; and the families
    "tokenize": ("tokenize", set()),
    "pretrain": ("pretrain", PRETRAINED),
    "distill": ("distill", PAIR),
    "evaluate": ("evaluate", PRETRAINED),
    "evaluate_student": ("evaluate", DISTILLED),
    "sharing": ("sharing", PAIR),
    "report": ("report", PRETRAINED | DISTILLED),
}


@pytest.mark.parametrize("stage", list(RUN))
def test_code_dependencies_are_the_import_closure(stage):
    described = STAGES["stages"][stage]
    described = described.get("do", described)
    listed = {dep for dep in described["deps"] if dep.endswith(".py")}
    module, families = RUN[stage]
    closure = import_closure([f"pipelines.{module}", *families], main=True)
    assert listed == {file.relative_to(PROJECT).as_posix() for file in closure.values()}


@pytest.mark.parametrize("stage", list(RUN))
def test_precision_makes_the_stages_stale_whose_code_reads_it(stage):
    described = STAGES["stages"][stage]
    described = described.get("do", described)
    code = [(PROJECT / dep).read_text("utf-8") for dep in described["deps"] if dep.endswith(".py")]
    reads = any(re.search(r"\bexecution\.(resolved_)?precision\b", text) for text in code)
    assert ("execution.precision" in described["params"]) == reads
    assert reads == (stage in ("pretrain", "distill", "evaluate", "evaluate_student"))


def test_ablations_depend_on_all_the_code_and_on_their_own_file():
    assert list(STAGES["stages"]) == [*RUN, "ablations"]
    stage = STAGES["stages"]["ablations"]
    assert {*stage["do"]["deps"]} >= {*PACKAGES, "sweeps/${item}.yaml", "sweeps/shared"}
    assert "execution.precision" in stage["do"]["params"]
    assert stage["do"]["outs"] == ["reports/ablations/${item}"]
    for name in stage["foreach"]:
        assert (PROJECT / "sweeps" / f"{name}.yaml").is_file()
        assert read_sweep(PROJECT / "sweeps" / f"{name}.yaml")["stage"] == "pretrain"  # a teacher would be one dep more


def test_every_compared_model_is_plotted():
    for plot in STAGES["plots"]:
        (settings,) = plot.values()
        assert [file.split("/")[1] for file in settings["y"]] == [*PARAMS["models"], *PARAMS["students"]]
