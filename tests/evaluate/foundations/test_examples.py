import torch
from pretended import pretended_device

from leakfrontier.evaluate.foundations.examples import Examples, from_bytes

PIXELS = torch.arange(24, dtype=torch.uint8).reshape(6, 1, 2, 2)
TARGETS = torch.arange(6)


def shifted(values: torch.Tensor) -> torch.Tensor:
    return values - 0.5


def test_inputs_are_made_from_the_stored_values_when_they_are_used() -> None:
    data = Examples(PIXELS, TARGETS, (from_bytes,)).then(shifted)
    expected = PIXELS.float() / 255 - 0.5
    assert torch.equal(data.inputs, expected)
    assert data.stored.dtype == torch.uint8
    rows = torch.tensor([[4, 1, 1], [0, 5, 2]])
    found = data.at(rows)
    assert torch.equal(found.inputs, expected[rows])
    assert torch.equal(found.targets, TARGETS[rows])
    assert torch.equal(data.at(slice(2, 4)).inputs, expected[2:4])
    assert data.at(slice(0)).inputs.shape == (0, 1, 2, 2)


def test_a_part_stays_compact() -> None:
    part = Examples(PIXELS, TARGETS, (from_bytes,)).part(torch.tensor([3, 0]))
    assert part.stored.dtype == torch.uint8
    assert part.targets.tolist() == [3, 0]
    assert torch.equal(part.inputs, PIXELS[[3, 0]].float() / 255)


def test_the_stored_values_move() -> None:
    data = Examples(PIXELS, TARGETS, (from_bytes,))
    with pretended_device() as there:
        moved = data.to(there)
        assert {moved.stored.device, moved.targets.device} == {there}
        assert moved.stored.dtype == torch.uint8


def test_many_examples_are_converted_in_parts() -> None:
    pixels = torch.randint(0, 256, (2500, 1, 2, 2), dtype=torch.uint8)
    seen: list[int] = []

    def watched(values: torch.Tensor) -> torch.Tensor:
        seen.append(len(values))
        return values

    data = Examples(pixels, torch.zeros(2500).long(), (from_bytes, watched))
    assert torch.equal(data.inputs, pixels.float() / 255)
    assert seen == [1000, 1000, 500]
