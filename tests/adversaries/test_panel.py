"""Panels are succeeded, never edited: what older results were made with stays as it was."""

from leakfrontier.adversaries import PANEL, SME, LearningToInvert, PriorAware
from leakfrontier.adversaries.panel import PANEL_2026_1, PANEL_2026_2, PANEL_2026_3


def test_older_panels_are_as_they_were() -> None:
    assert list(PANEL_2026_1.members) == ["PriorGuess", "LinearLeakage", "InvertingGradients"]
    assert list(PANEL_2026_2.members) == [*PANEL_2026_1.members, "SPEARPlusPlus"]
    assert vars(PANEL_2026_1.members["InvertingGradients"])["iterations"] == 300


def test_the_panel_in_force_has_candidates_and_weight_updates() -> None:
    assert PANEL is PANEL_2026_3
    assert PANEL.version == "2026.3"
    assert {**PANEL.members, **PANEL_2026_2.members} == PANEL.members
    assert PANEL.members["PriorAware"] == PriorAware()
    assert PANEL.members["SME"] == SME(iterations=300)
    assert PANEL.members["LearningToInvert"] == LearningToInvert(uploads=500)
    given = [name for name, member in PANEL.members.items() if member.needs_candidates]
    assert given == ["PriorAware"]
