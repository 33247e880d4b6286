"""Test whether attacked uploads of a training still hold the undefended update.

Clients are put back to the time before an attacked round, and go on with public examples. So they
have as much history as the attacked clients, and the model of the same round.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

from leakfrontier.defenses import Batch, Refused

from ..client.decoders import Decoder
from ..client.inversion import Inversion, PublicTraining, invert_trained, severity
from ..foundations.rows import ProbeRow
from ..foundations.seeds import generator
from .trained_scenes import Restored, TrainedScenes

EXAMINED = 3
"""The largest number of attacked rounds that are examined."""


@dataclass
class TrainedInversion:
    """The tests of an arm.

    Attributes:
        scenes: Its attacked rounds.
        shares: Public examples, for each client of a test.
        training: How these clients train.
        findings: The file that names the rounds whose uploads can be decoded.
    """

    scenes: TrainedScenes
    shares: Sequence[Batch]
    training: PublicTraining
    findings: Path
    _found: dict[int, Inversion | None] = field(default_factory=dict, init=False)

    def row(self, end: Callable[[], Restored]) -> ProbeRow | None:
        """Return the worst finding, and write which rounds can be decoded.

        It is None if clients refuse, or if they cannot be put back to the time before a round.
        Attacks on them then say so.

        Args:
            end: Returns the clients at the end of training, where they have most history.
        """
        if not self._examined:
            return None
        try:
            found = {number: self._inverted(number) for number in self._examined}
            last = self._test(end())
        except ValueError:
            return None
        self._write([n for n, one in found.items() if one is not None and one.decoder is not None])
        rows = [one.row for one in (*found.values(), last) if one is not None]
        return max(rows, key=severity, default=None)

    def pasts(self) -> list[Restored]:
        """Return the examined rounds, as they were before clients uploaded."""
        return [self.scenes.restored(number) for number in self._examined]

    def decoder(self, index: int) -> Decoder | None:
        """Return the decoder of the examined round that is nearest to an attacked upload.

        Args:
            index: The number of the attacked upload.

        Raises:
            ValueError: If the clients cannot be put back to the time before the round.
        """
        if not self._examined:
            return None
        number = self.scenes.number(index)
        nearest = min(self._examined, key=lambda one: abs(one - number))
        if self.findings.exists() and nearest not in json.loads(self.findings.read_text()):
            return None
        found = self._inverted(nearest)
        return None if found is None else found.decoder

    @property
    def _examined(self) -> list[int]:
        """Return some attacked rounds, spread over the training."""
        numbers = self.scenes.numbers()
        last = len(numbers) - 1
        places = {round(last * part / (EXAMINED - 1)) for part in range(EXAMINED)}
        return [numbers[place] for place in sorted(places)] if numbers else []

    def _inverted(self, number: int) -> Inversion | None:
        """Return the test of an attacked round."""
        if number not in self._found:
            self._found[number] = self._test(self.scenes.restored(number))
        return self._found[number]

    def _test(self, past: Restored) -> Inversion | None:
        """Return the test of clients at some time; None if too few of them upload."""
        scenes, memories = self.scenes, [*islice(cycle(past.memories), len(self.shares))]
        rng = generator("trained inversion", *scenes.draws, past.number)
        client = scenes.world.client(scenes.defense, past.model)
        try:
            return invert_trained(client, self.shares, memories, self.training, rng)
        except Refused:
            return None

    def _write(self, numbers: Sequence[int]) -> None:
        self.findings.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.findings.with_suffix(f".{os.getpid()}.tmp")
        unfinished.write_text(json.dumps(numbers))
        unfinished.replace(self.findings)
