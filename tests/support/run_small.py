"""Run a script as it is, but with small scenarios, few uploads and, for the panel, two attacks.

python run_small.py SCRIPT
"""

import runpy
import sys
from pathlib import Path
from typing import Any

from documents import SMALL_SCENARIO

import leakfrontier.evaluate.door.evaluation as door
from leakfrontier.evaluate.run.config import RunConfig, load_config

run = door.run


def run_small(config: RunConfig, folder: Path, **options: Any) -> Any:  # noqa: ANN401 - as `run`
    """Run a configuration whose defenses, attacks and number of scenarios are as given."""
    parts = {name: getattr(config, name) for name in RunConfig.model_fields}
    if parts["adversaries"] == "panel":
        parts["adversaries"] = ["PriorGuess", "LinearLeakage"]
    defenses = parts["defenses"]  # those of a preset, then the given ones
    parts["defenses"] = (*defenses[:1], *defenses[1:][-3:])
    parts["scenarios"] = [{**SMALL_SCENARIO, "title": one.name} for one in config.scenarios]
    small = load_config({**parts, "observations": 3})
    return run(small, folder, **{**options, "workers": 1})


if __name__ == "__main__":
    door.run = run_small
    sys.path.insert(0, str(Path(sys.argv[1]).parent))
    runpy.run_path(sys.argv[1], run_name="__main__")
