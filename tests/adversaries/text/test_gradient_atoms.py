import pytest
import torch
from federated import rng
from sentences import language_model, seen_by_server, sentences

from leakfrontier.adversaries.text.gradient_atoms import Part, pursue, sentence_atoms
from leakfrontier.adversaries.text.transformer import find_transformer


def drawn(count: int, layers: int = 1) -> tuple[list[list[Part]], list[list[torch.Tensor]]]:
    """Return atoms, and the gradients that they stand for."""
    draws = rng(3)
    atoms = [
        [
            Part(torch.randn(5, 8, generator=draws), torch.randn(5, 6, generator=draws))
            for _ in range(layers)
        ]
        for _ in range(count)
    ]
    return atoms, [[part.slopes.T @ part.inputs for part in atom] for atom in atoms]


def test_matching_pursuit_finds_the_atoms_of_a_mixture() -> None:
    atoms, built = drawn(7, layers=2)
    mixture = [0.5 * a - 0.25 * b for a, b in zip(built[2], built[5], strict=True)]
    selection = pursue(atoms, mixture, most=3, ridge=0.0, tolerance=1e-6)
    assert sorted(selection.chosen) == [2, 5]
    amounts = dict(zip(selection.chosen, selection.amounts, strict=True))
    assert amounts[2] == pytest.approx(0.5, rel=1e-4)
    assert amounts[5] == pytest.approx(-0.25, rel=1e-4)
    assert selection.residual < 1e-6


def test_what_too_few_atoms_leave_is_the_residual() -> None:
    atoms, built = drawn(7)
    mixture = built[2][0] - 0.25 * built[5][0]
    selection = pursue(atoms, [mixture], most=1, ridge=0.0, tolerance=1e-6)
    assert selection.chosen == [2]
    left = mixture - selection.amounts[0] * built[2][0]
    assert selection.residual == pytest.approx(float(left.norm() / mixture.norm()), rel=1e-4)
    loose = pursue(atoms, [mixture], most=7, ridge=0.0, tolerance=0.5)
    assert len(loose.chosen) == 1


def test_a_ridge_of_one_halves_the_amount_of_a_single_atom() -> None:
    atoms, built = drawn(1)
    selection = pursue(atoms, built[0], most=1, ridge=1.0, tolerance=0.0)
    assert selection.amounts == [pytest.approx(0.5)]


def test_no_atom_is_chosen_twice() -> None:
    atoms, built = drawn(2)
    selection = pursue(atoms, built[1], most=5, ridge=1.0, tolerance=0.0)  # which leaves a half
    assert selection.chosen == [1, 0]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_atom_is_the_gradient_of_its_sentence_alone(family: str) -> None:
    model, tokens = language_model(family), sentences([7, 5])
    observation = seen_by_server(model, tokens)
    view = find_transformer(observation)
    layers = [view.second.projections[0], view.last.down]
    atoms = sentence_atoms(view, observation, layers, tokens, tokens)
    assert [len(atom[0].inputs) for atom in atoms] == [7, 5]  # without padding
    for row, atom in enumerate(atoms):
        one = tokens[row : row + 1]
        alone = seen_by_server(model, one)
        for layer, part in zip(layers, atom, strict=True):
            made = part.slopes.T @ part.inputs
            torch.testing.assert_close(made, layer.gradient(alone), rtol=1e-3, atol=1e-6)
    assert not any(module._forward_hooks for module in model.modules())
