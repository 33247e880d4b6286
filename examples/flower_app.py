"""A Flower app whose server captures what it receives, without a defense and with one.

python examples/flower_app.py captures
leakfrontier attack captures/none
leakfrontier attack captures/DPSGD
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.simulation import run_simulation

from leakfrontier.adversaries import FedAvg
from leakfrontier.defenses import DPSGD, Batch, Defense
from leakfrontier.evaluate.data.data import load_dataset
from leakfrontier.evaluate.outside.capture import Description
from leakfrontier.evaluate.outside.flower import Capturing, DefenseMod, train_locally
from leakfrontier.evaluate.users.methods import Method

CLIENTS, ROUNDS = 2, 3
TRAINING = FedAvg(epochs=1, batch_size=1, lr=0.1)
DEFENSES: dict[str, Defense] = {
    "none": Defense(),
    "DPSGD": DPSGD(noise_multiplier=1.0, max_grad_norm=1.0),
}
DATA = load_dataset("fashion-mini")


def described(defense: Method) -> Description:
    """Return how updates come about: what the server knows."""
    return Description(
        model=Method(name="mlp", options={"width": 64}),
        space=DATA.space,
        protocol=Method(name="FedAvg", options={"epochs": 1, "batch_size": 1, "lr": 0.1}),
        batch_size=1,
        dataset="fashion-mini",
        defense=defense,
    )


ABOUT = described(Method(name="none"))


def private(client: int, round_: int) -> Batch:
    """Return the one example that a client trains on in a round."""
    return DATA.normalised[0].at(slice(CLIENTS * round_ + client, CLIENTS * round_ + client + 1))


def client_app(defense: Defense) -> ClientApp:
    """Return an app that trains under a defense."""
    app = ClientApp(mods=[DefenseMod(defense)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        client = int(context.node_config["partition-id"])
        round_ = int(message.content["config"]["server-round"]) - 1
        model = ABOUT.build()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train_locally(model, private(client, round_), TRAINING, space=DATA.space)
        metrics = MetricRecord({"num-examples": 1, "client": client, "round": round_})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def server_app(folder: Path, name: str) -> ServerApp:
    """Return an app that averages what it receives, and captures it."""
    app = ServerApp()
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} if name == "DPSGD" else {}
    about = described(Method(name=name, options=options))

    def truth(reply: Message) -> Batch:  # an audit: here the private examples are known
        metrics = reply.content["metrics"]
        return private(int(metrics["client"]), int(metrics["round"]))

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        inner = FlowerFedAvg(fraction_evaluate=0.0)
        strategy = Capturing(inner, folder / name, about, truth=truth)
        arrays = ArrayRecord(ABOUT.build().state_dict())
        result = strategy.start(grid, initial_arrays=arrays, num_rounds=ROUNDS)
        print(f"{name}: {result.train_metrics_clientapp[ROUNDS]}")

    return app


def main(folder: Path) -> None:
    """Train without a defense and with one, and capture both."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for name, defense in DEFENSES.items():
        run_simulation(
            server_app(folder, name),
            client_app(defense),
            num_supernodes=CLIENTS,
            backend_config={
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {
                    "address": "local",  # not a cluster that happens to run here
                    "num_cpus": 1,  # clients take turns in one process
                    "log_to_driver": False,
                    "include_dashboard": False,
                },
            },
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
