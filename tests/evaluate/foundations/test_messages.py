from __future__ import annotations

import pytest
import torch

from leakfrontier.evaluate.foundations.messages import packed, unpacked


def test_tensors_and_json_arrive() -> None:
    base = torch.arange(6.0)
    tensors = {"a": base[:3], "b": base[3:].reshape(1, 3), "c": torch.ones(2, dtype=torch.long)}
    found, about = unpacked(packed(tensors, {"clients": (1, 2), "text": "é"}))
    torch.testing.assert_close(found, tensors)
    assert about == {"clients": [1, 2], "text": "é"}
    assert unpacked(packed({})) == ({}, None)


@pytest.mark.parametrize("content", [b"", b"12345678", packed({"a": torch.ones(3)})[:-4]])
def test_damage_is_told(content: bytes) -> None:
    with pytest.raises(ValueError, match="a message is damaged"):
        unpacked(content)
