"""Choose the parameters of the standard preset, and print its results.

python benchmarks/standard.py noise
python benchmarks/standard.py tune FOLDER [SCENARIO] [EPSILON] [NORMS] [RATES]
python benchmarks/standard.py seconds PACKS...
python benchmarks/standard.py table PACKS...

`noise` prints the least noise multiplier for each epsilon and scenario. `tune` trains at one
epsilon with each pair of clipping norm and learning rate, and the control with each learning rate.
Its seed is not one of the preset. It continues the results in its folder. `seconds` prints the cost
of the scenarios of packs in core-minutes. `table` prints their standings, as in
docs/lab/standard.md.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import pandas as pd
import torch

from leakfrontier.adversaries.base import THREATS
from leakfrontier.evaluate.conclude.coordinates import proof_text
from leakfrontier.evaluate.conclude.labels import percent
from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.foundations.seeds import fork, generator
from leakfrontier.evaluate.privacy.accounting import calibrate
from leakfrontier.evaluate.privacy.claims import training_plan
from leakfrontier.evaluate.run.cells import TrainTrial, undefended
from leakfrontier.evaluate.run.config import RunConfig, load_config
from leakfrontier.evaluate.run.run import run_trials
from leakfrontier.evaluate.share.leaderboard import Setting, make_settings
from leakfrontier.evaluate.share.pack import read_pack
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.users.names import label
from leakfrontier.evaluate.world.scenario import Scenario, load_world
from leakfrontier.reports.frontier_figure import point_names
from leakfrontier.reports.leaderboard import place_text

EPSILONS = (1.0, 3.0, 8.0)
SEED = 1000


def busiest(scenario: Scenario, seed: int) -> int:
    """Return the number of rounds of the client that takes part most often."""
    training = scenario.training
    rng = generator("training", *TrainTrial(scenario, Method(name="none"), seed).draws)
    counts = torch.zeros(training.clients, dtype=torch.long)
    for _ in range(training.rounds):  # like `Federation.round`
        chosen = torch.randperm(training.clients, generator=fork(rng))
        counts[chosen[: training.clients_per_round]] += 1
    return int(counts.max())


def least_noise(config: RunConfig, scenario: Scenario, epsilon: float) -> float:
    """Return the least noise multiplier for the busiest client of any seed."""
    world = load_world(scenario)
    rounds = max(busiest(scenario, seed) for seed in range(config.seeds))
    plan = training_plan(world, "record", rounds)
    return calibrate(epsilon, plan.sample_rate, plan.steps, plan.delta)


def noise(config: RunConfig) -> None:
    """Print the noise of every scenario and epsilon."""
    for scenario in config.scenarios:
        found = (f"{least_noise(config, scenario, epsilon):.4f}" for epsilon in EPSILONS)
        print(f"{scenario.name}: {', '.join(found)}", flush=True)


def tune(
    config: RunConfig,
    folder: str,
    name: str = "",
    epsilon: str = "8",
    norms: str = "0.3,1,3",
    rates: str = "0.0025,0.005,0.01",
) -> None:
    """Print the accuracy under each clipping norm and learning rate."""
    for scenario in config.scenarios:
        if name not in ("", scenario.name):
            continue
        sigma = round(least_noise(config, scenario, float(epsilon)), 3)
        arms = [Method(name="none")]
        arms += [
            Method(name="DPSGD", options={"noise_multiplier": sigma, "max_grad_norm": float(norm)})
            for norm in norms.split(",")
        ]
        trials = []
        for rate, arm in product(map(float, rates.split(",")), arms):
            lr = rate / 0.005 if scenario.training.server == "sgd" else rate  # scaled for SGD
            changed = {"lr": lr, "defense_lr": {}}
            training = scenario.training.model_copy(update=changed)
            trials.append(TrainTrial(scenario.model_copy(update={"training": training}), arm, SEED))
        results = run_trials(trials, Path(folder), panel=config.panel, config={}, workers=1)
        last = results.utility.sort_values("round").drop_duplicates("cell", keep="last")
        found = (last["correct"] / last["total"]).set_axis(last["cell"])
        for trial in trials:
            what = "control" if undefended(trial.defense) else label(trial.defense)
            accuracy = 100 * found.get(trial.cell.key, float("nan"))
            print(f"{scenario.name}: {what}, lr {trial.scenario.training.lr:g}: {accuracy:.1f} %")


def seconds(_: RunConfig, *packs: str) -> None:
    """Print the core-minutes of packs by scenario, and those of the slowest attack."""
    cells = pd.concat(read_pack(Path(pack)).results.cells for pack in packs)
    minutes = cells.groupby("scenario", sort=False)["seconds"].sum() / 60
    attacks = cells.groupby(["scenario", "adversary_name"], sort=False)["seconds"].sum() / 60
    for scenario, total in minutes.items():
        name, most = attacks[scenario].idxmax(), attacks[scenario].max()
        print(f"{scenario}: {total:.1f}, of which {name} {most:.1f}")


def table(config: RunConfig, *packs: str) -> None:
    """Print the standings of packs, in the preset's order."""
    settings = make_settings([read_pack(Path(pack)) for pack in packs])
    places = {scenario.name: place for place, scenario in enumerate(config.scenarios)}
    for setting in sorted(settings, key=lambda setting: places[setting.name]):
        print(markdown(setting))


def markdown(setting: Setting) -> str:
    """Return the standings of a setting, with remarks and the conclusion."""
    evaluation = setting.evaluations[0]
    names = point_names(evaluation.frontier.points)
    columns = ["evidence", "place", "defense", "accuracy", *THREATS, "blind"]
    columns += ["given candidates", "proof allows", "verdict"]
    lines = [f"\n**{setting.name}** (attacked: the model of round {setting.checkpoint})\n"]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    standing = setting.table.set_index("defense")
    blind = evaluation.results.worst_case().set_index("defense")["blind"]
    for row in setting.table[setting.table["server"] == "passive"].itertuples():
        found = standing.loc[[row.defense]].set_index("server")["success_text"]
        rates = [*(found[server] for server in THREATS), percent(blind[row.defense])]
        rates += [str(row.candidates_text), proof_text(row)]
        verdict = str(row.verdict)
        for other in filter(None, (row.dominated, row.tied_with)):
            verdict = verdict.replace(other, names[other])
        fields = [row.evidence, place_text(row), names[row.defense], row.accuracy_text]
        fields += [*rates, verdict]
        lines.append(f"| {' | '.join(map(str, fields))} |")
    for defense, share in _originals(evaluation.results).items():
        what = "the private picture itself is identified in"
        lines.append(f"\n{names[defense]}: {what} {percent(share)}.")
    return "\n".join([*lines, f"\n{evaluation.conclusion}"])


def _originals(results: Conclusions) -> pd.Series[float]:
    """Return, for each transforming defense, the share of identified original examples."""
    attacks = results.attacks
    passive = (attacks["threat"] == "passive") & ~attacks["baseline"]
    own = attacks[passive & ~attacks["candidates_granted"] & attacks["transformed"].fillna(False)]
    victims = own.groupby(["defense", "seed", "observation", "victim"])["identified_original"].max()
    return victims.astype(float).groupby("defense").mean()


if __name__ == "__main__":
    {"noise": noise, "tune": tune, "seconds": seconds, "table": table}[sys.argv[1]](
        load_config("standard"), *sys.argv[2:]
    )
