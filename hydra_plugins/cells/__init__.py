"""The sweeper Hydra finds: it hands a sweep to `pipelines.sweeping`.

Loaded at the start of every command, so it imports nothing of weight.
"""

from __future__ import annotations

from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

ConfigStore.instance().store(
    group="hydra/sweeper", name="cells", node={"_target_": f"{__name__}.CellSweeper"}, provider="cells"
)


class CellSweeper(Sweeper):
    """Multirun over the cells of a sweep file, with a queue between them and the launcher's jobs, which are workers."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context = config, hydra_context
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        from pipelines.sweeping.start import start

        assert self.hydra_context is not None
        assert self.config is not None
        return start(self.config, arguments, self.hydra_context.config_loader, self.launcher)
