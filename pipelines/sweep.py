"""Sweeps: every cell of an ablation table once, on any number of workers, and the table with its verdicts.

    python -m pipelines.sweep +sweep=hlr_cycles                  launch or resume, here
    python -m pipelines.sweep +sweep=hlr_cycles dry_run=true     what it would run, and for how long
    python -m pipelines.sweep +sweep=hlr_cycles seeds=5          only the seeds that are missing
    python -m pipelines.sweep +sweep=hlr_cycles worker=true      one more worker, on any host that shares the storage

The table is written to reports/ablations/<sweep>/. Stopped at any moment and started again, it goes on.
"""

from __future__ import annotations

import inspect
import os
import sys

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf.errors import OmegaConfBaseException

from models.configuration import ConfigError
from pipelines.command import explain, guarded, project_folder, register, report
from pipelines.sweep_file import SWEEPS, read_sweep
from pipelines.sweeping.options import STATED
from pipelines.sweeping.start import job


def main() -> int:
    """The command line; returns the exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"
    names = sorted(path.stem for path in SWEEPS.glob("*.yaml"))
    try:
        folder = project_folder()
        words = f"{inspect.getdoc(sys.modules[__name__])}\n\n+sweep=<one of>: {', '.join(names)}"
        register(folder, words, sweeper="cells")
        for name in names:
            node = read_sweep(SWEEPS / f"{name}.yaml") | STATED
            ConfigStore.instance().store(group="sweep", name=name, node=node, package="_global_")
    except (ConfigError, OmegaConfBaseException) as error:
        return report(explain(error), 2)
    os.chdir(folder)
    sys.argv.append("hydra.mode=MULTIRUN")
    return guarded(hydra.main(config_path=None, config_name="params", version_base="1.3")(job))


if __name__ == "__main__":
    sys.exit(main())
