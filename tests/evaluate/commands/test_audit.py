from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from leakfrontier.evaluate.privacy.audit import AUDITS, Audit

Command = Callable[..., tuple[int, str, str]]
UserFile = Callable[..., Path]

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


def test_audit_of_an_honest_defense(command: Command) -> None:
    code, output, _ = command("audit", HONEST, "--steps", 10, "--sample-rate", 0.1)
    assert code == 0
    assert output.count("not refuted: ") == len(AUDITS)
    assert "verified" not in output
    assert "a perfect implementation would show" in output
    assert "Simulated noise is reproducible from the seed" in output


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
    assert not_applied["verdict"].startswith("not applicable: one run needs many canaries")


@pytest.mark.parametrize(
    ("defense", "reason"),
    [
        (
            "{name: ClientDP, noise_multiplier: 1.0}",
            "so the unit must be a record: use step canaries",
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

    monkeypatch.setattr("leakfrontier.evaluate.door.auditing.run_audits", finding)
    _, output, _ = command("audit", HONEST, "--method", "step-canaries", "--runs", 2, "--json")
    (document,) = json.loads(output)
    assert asked == [2, 2]
    assert document["p_value"] == 0.06
    assert document["verdict"] == "not refuted: words"


@pytest.mark.parametrize(
    ("violated", "verdict"),
    [(False, "not refuted: two: parts"), (True, "refuted: two: parts (p = 1e-06)")],
)
def test_the_verdict_does_not_depend_on_how_others_word_theirs(
    command: Command, monkeypatch: pytest.MonkeyPatch, violated: bool, verdict: str
) -> None:
    found = Audit(
        method="one run", claimed=4.0, p_value=1e-6, violated=violated, words="two: parts"
    )
    monkeypatch.setattr(Audit, "verdict", "other words")
    monkeypatch.setattr(
        "leakfrontier.evaluate.door.auditing.run_audits", lambda **_: {"one run": found}
    )
    code, output, _ = command("audit", HONEST, "--method", "one-run", "--json")
    assert code == violated
    assert json.loads(output)[0]["verdict"] == verdict


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{name: TopK, ratio: 0.1}",), "TopK claims no differential privacy: there is nothing"),
        (("{name: DPSGD, noise_multiplier: 0}",), "claims an infinite epsilon"),
        (("{name: DPSGD, noise_multiplier: 0.00001}",), "claims an infinite epsilon"),
        (("TopK",), "TopK: cannot be built with no options: missing 1 required positional arg"),
        (("TopK",), "its options are ratio, "),
        (
            ("{name: DPSGD, noise_multiplier: [1, 2]}",),
            "give 2 configurations, but one is needed: give single values",
        ),
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
