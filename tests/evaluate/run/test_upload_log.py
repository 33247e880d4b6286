from __future__ import annotations

from pathlib import Path

import torch
from upload_logs import every

from leakfrontier.defenses import Batch
from leakfrontier.evaluate.client.clients import Memory
from leakfrontier.evaluate.run.upload_log import Hidden, Logged, SecretLog, UploadLog


def test_what_the_server_saw_is_read_again(tmp_path: Path) -> None:
    model = {"a.weight": torch.randn(3)}
    first = Logged(2, (4, 1), model, {"a.weight": torch.randn(3)})
    before = Logged(1, (4,), {"a.weight": torch.zeros(3)}, {"a.weight": torch.ones(3)})
    other = Logged(2, (0,), model, {"a.weight": torch.randn(3)})
    UploadLog.write(tmp_path / "logs" / "seen", [(1, [first, before]), (0, [other])])
    log = UploadLog(tmp_path / "logs" / "seen")
    assert (len(log), log.victim(0), log.victim(1)) == (2, 1, 0)
    for expected, found in zip([first, before], every(log, 0), strict=True):
        assert (found.round, found.clients) == (expected.round, expected.clients)
        assert torch.equal(found.update["a.weight"], expected.update["a.weight"])
        assert torch.equal(found.model["a.weight"], expected.model["a.weight"])
    assert log.upload(0).model is log.upload(1).model  # attacks on one model are vectorised


def test_what_it_did_not_see_is_read_again(tmp_path: Path) -> None:
    batch = Batch(torch.randn(2, 3), torch.tensor([0, 1]))
    epoch = tuple(torch.tensor([number]) for number in range(12))
    remembered = Hidden(torch.tensor([7, 9]), batch, Memory(b"bytes", epoch))
    lost = Hidden(torch.tensor([1, 2]), batch, "it holds a file")
    SecretLog.write(tmp_path / "hidden", {(2, 1): remembered, (2, 11): lost})
    found = SecretLog(tmp_path / "hidden")
    again = found[2, 1]
    assert torch.equal(again.rows, remembered.rows)
    assert torch.equal(again.trained_on.inputs, batch.inputs)
    assert isinstance(again.memory, Memory)
    assert again.memory.defense == b"bytes"
    assert [int(rows) for rows in again.memory.epoch] == [*range(12)]
    assert found[2, 11].memory == "it holds a file"
