"""The recipe of MELT-1.6B is the paper's, and gives way to the command line."""

from pipelines.command import load
from pipelines.reported import paper


def test_melt_1b6_is_trained_as_the_paper_says():
    config, reported = load(["model=melt_1b6", "data.vocab_size=49152"]), paper("melt")["training"]
    distill = config.distill
    assert config.model.chunk == reported["chunk"]  # type: ignore[attr-defined]
    assert distill.context == reported["sequence"]
    assert distill.context * distill.batch_size == reported["batch_tokens"]
    assert (distill.lr, distill.gate_lr) == (reported["lr"]["body"], reported["lr"]["gates"])
    assert (distill.phase1_steps, distill.phase2_steps) == (reported["phase1"]["steps"], reported["phase2"]["steps"])
    assert distill.alignment == reported["phase2"]["attention_alignment_beta"]
    assert list(distill.betas) == reported["optimizer"]["betas"]
    assert (distill.weight_decay, distill.clip) == (1e-4, reported["optimizer"]["clip"])
    assert distill.interpolation
    assert distill.every_loop
    assert config.execution.recompute


def test_the_command_line_changes_single_values_of_a_recipe():
    config = load(["model=melt_1b6", "distill.lr=1e-5", "execution.devices=1"])
    assert config.distill.lr == 1e-5
    assert config.distill.context == 10000
    assert config.execution.devices == 1


def test_other_presets_take_everything_from_params():
    tiny, plain = load(["model=melt_tiny"]), load([])
    assert (tiny.distill, tiny.execution, tiny.teacher) == (plain.distill, plain.execution, plain.teacher)
