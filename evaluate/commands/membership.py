"""The command that runs membership inference on uploads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from ..foundations.errors import writable
from ..foundations.terminal import terminal
from .options import (
    AsJson,
    Data,
    DefenseText,
    defense_from,
    print_path,
    scenario_from,
)


def membership(
    defense: DefenseText,
    dataset: Annotated[str, typer.Option(help="Dataset: a name or a folder.")] = "fashion-mini",
    model: Annotated[str, typer.Option(help="Model: a name or FILE.py:factory.")] = "lenet",
    uploads: Annotated[
        int,
        typer.Option(
            min=100, help="Number of uploads. 1000 suffice for a false positive rate of 1 %."
        ),
    ] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Examples per upload.")] = 1,
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Folder for membership.png, .svg and .csv.")] = Path(
        "runs/membership"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and uploads.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Run membership inference on uploads, and compare it with the defense's guarantee.

    Exit code 1 if an attack exceeds what the guarantee permits.
    """
    import torch

    from leakfrontier.reports.membership import write_membership

    from ..door.auditing import loaded
    from ..foundations.seeds import generator
    from ..privacy.membership import claimed_bounds
    from ..privacy.membership import membership as play
    from ..users.names import label
    from .membership_report import MembershipReport

    scenario = scenario_from(dataset, model, data).model_copy(update={"batch_size": batch})
    method = defense_from(defense)
    writable(out)
    world, defended, attacked = loaded(scenario, method, seed)
    torch.set_num_threads(1)  # uploads are small, so several threads only wait for each other
    progress = terminal(stderr=True)
    found = play(
        world.client(defended, attacked),
        world.train,
        world.threat(knows_defense=True),
        generator("membership", scenario.config(), method.config(), seed),
        uploads=uploads,
        batch_size=batch,
        track=lambda games: track(games, "uploads", console=progress, transient=True),
    )
    title = f"{label(method)} on {scenario.name}"
    report = MembershipReport(title, found, claimed_bounds(defended), uploads)
    write_membership(found, report.bounds, f"Membership under {title}", out)
    if as_json:
        typer.echo(json.dumps(report.document(), indent=2, allow_nan=False))
    else:
        report.print(terminal())
    print_path(progress, "Curves:", out / "membership.png")
    if report.exceeding:
        raise typer.Exit(1)
