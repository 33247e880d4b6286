from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from leakfrontier.evaluate.privacy.audit import AUDITS, Audit

Command = Callable[..., tuple[int, str, str]]
UserFile = Callable[..., Path]

SIZES = ("--examples", 60_000, "--batch", 256, "--rounds", 500)
HONEST = "{name: DPSGD, noise_multiplier: 1.0}"
QUICK = ("--steps", 1, "--sample-rate", 1, "--method", "residual-noise")
QUIET = """
from leakfrontier.defenses import DPSGD

@dataclass
class Quiet(DPSGD):
    def gradient(self, model, loss, batch, rng):
        worker = DPSGD(0.8 * self.noise_multiplier, self.max_grad_norm)
        worker._batch_size = self._batch_size
        return worker.gradient(model, loss, batch, rng)
"""


@pytest.fixture
def command(command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return the command line, with a short table of proofs."""
    monkeypatch.setattr("leakfrontier.evaluate.advise.recommendation.PROVEN_LADDER", (1.0, 2.0))
    return command


@pytest.mark.parametrize("as_json", [True, False])
def test_what_cannot_be_reached_is_an_answer(command: Command, as_json: bool) -> None:
    options = ("--json",) if as_json else ()
    code, output, _ = command("advise", *SIZES, "--reconstruction-success", 0.01, *options)
    assert code == 1
    assert "cannot be reached: the closest" in output
    if as_json:
        assert json.loads(output)["recommended"] is None


@pytest.mark.parametrize("name", ["--rounds", "--batch", "--examples"])
def test_zero_is_not_the_same_as_nothing(command: Command, name: str) -> None:
    code, _, errors = command("advise", "--epsilon", 3, *SIZES, name, 0)
    assert code == 2
    assert "give --examples" not in errors
    assert "got 0" in errors or "the 0 examples" in errors


def test_advise_from_numbers_alone(command: Command, tmp_path: Path) -> None:
    code, output, _ = command("advise", "--epsilon", 3, *SIZES, "--out", tmp_path)
    assert code == 0
    for part in ("eps PLD", "bound, upload", "-> ", "Who sees what", "Warnings", "Tuning on priv"):
        assert part in output
    assert "accuracy" not in output.partition("Recommended")[0]
    page = (tmp_path / "advice.html").read_text()
    assert "Take noise multiplier" in page
    assert "http://" not in page.partition("<script>")[0]
    document = json.loads((tmp_path / "advice.json").read_text())
    assert document["recommended"]["epsilon"]["pld"] <= 3


def test_advise_in_epochs_as_json(command: Command) -> None:
    rounds = command("advise", "--epsilon", 3, *SIZES, "--json")[1]
    epochs = ("--examples", 60_000, "--batch", 240, "--epochs", 2)
    code, output, _ = command("advise", "--epsilon", 3, *epochs, "--json")
    assert code == 0
    assert json.loads(rounds)["question"]["rounds"] == 500
    assert json.loads(output)["question"]["rounds"] == 500
    assert json.loads(output)["setting"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (SIZES, "exactly one of epsilon, reconstruction_success, min_accuracy must be given"),
        ((*SIZES, "--epsilon", 3, "--min-accuracy", 0.5), "got epsilon, min_accuracy"),
        ((*SIZES, "--epsilon", -1), "epsilon must be in (0, inf), got -1"),
        (("--epsilon", 3), "give --examples, --batch and --rounds"),
        ((*SIZES, "--epsilon", 3, "--epochs", 2), "give --rounds or --epochs, not both"),
        ((*SIZES, "--epsilon", 3, "--batch", 60_001), "the sample rate would be above 1"),
        ((*SIZES, "--epsilon", 3, "--clients", 0), "clients must be between 1 and the 60000"),
        ((*SIZES, "--epsilon", 3, "--delta", 1), "delta must be in (0, 1), got 1"),
        ((*SIZES, "--min-accuracy", 0.9), "give a model"),
        (("--epsilon", 3, "--dataset", "nope"), "dataset must be one of fashion-mini"),
        (("--epsilon", 3, "--model", "{name: [}"), "--model '{name: [}' is not a valid YAML"),
        (("--epsilon", 3, "--dataset", "digits", "--model", "nope"), "model must be one of mlp"),
    ],
)
def test_advise_refuses_bad_input(
    command: Command, tmp_path: Path, arguments: tuple[object, ...], message: str
) -> None:
    code, output, errors = command("advise", *arguments, "--out", tmp_path / "out")
    assert code == 2
    assert message in " ".join(errors.split())
    assert "Traceback" not in output + errors


def test_audit_of_an_honest_defense(command: Command) -> None:
    code, output, _ = command("audit", HONEST, "--steps", 10, "--sample-rate", 0.1)
    assert code == 0
    assert output.count("not refuted: ") == len(AUDITS)
    assert "verified" not in output
    assert "a perfect implementation would show" in output


def test_audit_refutes_too_little_noise(command: Command, user_file: UserFile) -> None:
    defense = f"{{name: '{user_file(QUIET)}:Quiet', noise_multiplier: 1.0}}"
    code, output, _ = command("audit", defense, *QUICK, "--runs", 2, "--json")
    assert code == 1
    (finding,) = json.loads(output)
    assert finding["refuted"]
    assert (finding["refuted_runs"], finding["runs"]) == (2, 2)
    assert finding["lower_bound"] > finding["claimed"]
    assert finding["verdict"].startswith("refuted: the noise is 0.")
    assert "refuted" in command("audit", defense, *QUICK)[1]


def test_an_audit_that_does_not_apply_beside_one_that_does(command: Command) -> None:
    code, output, _ = command(
        "audit", "{name: ClientDP, noise_multiplier: 1.0}", *QUICK, "--method", "one-run", "--json"
    )
    assert code == 0
    applied, not_applied = json.loads(output)
    assert applied["refuted"] is False
    assert not_applied["refuted"] is None
    assert not_applied["verdict"].startswith("not applicable: one run holds many canaries only")


@pytest.mark.parametrize(
    ("defense", "reason"),
    [
        (
            "{name: ClientDP, noise_multiplier: 1.0}",
            "where the unit is a record: use step canaries",
        ),
        ("{name: Noise, scale: 1, distribution: laplace, max_norm: 1}", "noise is not Gaussian"),
    ],
)
def test_a_claim_that_no_audit_applies_to_is_still_one(
    command: Command, defense: str, reason: str
) -> None:
    code, _, errors = command("audit", defense, "--method", "one-run")
    errors = " ".join(errors.split())
    assert code == 2
    assert "none of the audits applies: " in errors
    assert reason in errors
    assert "nothing to audit" not in errors


def test_runs_of_an_audit_are_corrected_for_in_all_that_is_said(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def finding(*, runs: int, **_: object) -> dict[str, Audit]:
        asked.append(runs)
        return {
            "step canaries": Audit(
                method="step canaries",
                claimed=4.0,
                lower_bound=3.9,
                ceiling=3.0,
                p_value=0.03,
                violated=False,
                words="words",
            )
        }

    monkeypatch.setattr("leakfrontier.evaluate.commands.audit.run_audits", finding)
    _, output, _ = command("audit", HONEST, "--method", "step-canaries", "--runs", 2, "--json")
    (document,) = json.loads(output)
    assert asked == [2, 2]
    assert document["p_value"] == 0.06
    assert document["verdict"] == "not refuted: words"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{name: TopK, ratio: 0.1}",), "TopK claims no differential privacy: there is nothing"),
        (("{name: DPSGD, noise_multiplier: 0}",), "claims an infinite epsilon"),
        (("{name: DPSGD, noise_multiplier: 0.00001}",), "claims an infinite epsilon"),
        (("TopK",), "TopK: cannot be built with no options: missing 1 required positional arg"),
        (("TopK",), "its options are ratio, "),
        (("{name: DPSGD, noise_multiplier: [1, 2]}",), "make 2: give single values"),
        (
            ("{name: DPSGD, noise_multiplier: many}",),
            "built with {'noise_multiplier': 'many'}: '<=",
        ),
        (("Nope",), "unknown defense 'Nope': choose one of"),
        (("absent.py:Mine",), "there is no file"),
        ((HONEST, "--sample-rate", 1.5), "sample_rate must be in (0, 1], got 1.5"),
        ((HONEST, "--steps", 0), "steps must be at least 1, got 0"),
        ((HONEST, "--delta", 0), "delta must be in (0, 1), got 0"),
        ((HONEST, "--method", "nope"), "Invalid value"),
        ((HONEST, "--dataset", "nope"), "dataset must be one of"),
    ],
)
def test_audit_refuses_bad_input(
    command: Command, arguments: tuple[object, ...], message: str
) -> None:
    code, output, errors = command("audit", *arguments)
    assert code == 2
    assert message in " ".join(errors.split())
    assert "Traceback" not in output + errors
