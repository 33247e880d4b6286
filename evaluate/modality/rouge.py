"""ROUGE of reconstructed texts in any script, by the package rouge-score."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_LEAST_WORDS = {"rouge1": 1, "rouge2": 2, "rougeL": 1}

_UNSPACED = (
    *(range(0x0E00, 0x0F00), range(0x1000, 0x10A0), range(0x1780, 0x1800)),  # Thai to Khmer
    *(range(0x2E80, 0x2FE0), range(0x3005, 0x3008), range(0x3040, 0x3100), range(0x31F0, 0x3200)),
    *(range(0x3400, 0x4DC0), range(0x4E00, 0xA000), range(0xF900, 0xFB00)),  # Han
    *(range(0xFF66, 0xFFA0), range(0x20000, 0x40000)),
)
"""Characters of scripts that have no spaces between words."""


@dataclass(frozen=True)
class _Words:
    """Splits texts into words. For ASCII, these are rouge-score's own words.

    Attributes:
        symbols: Whether every other visible character is a word too.
    """

    symbols: bool = False

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text in lower case.

        A word is a run of letters, digits and their marks. If a script has no spaces, a word is one
        character.
        """
        words: list[str] = []
        open_word = False
        for character in unicodedata.normalize("NFC", text.lower()):
            kind = unicodedata.category(character)
            if kind[0] in "LN":
                alone = any(ord(character) in part for part in _UNSPACED)
                if open_word and not alone:
                    words[-1] += character
                else:
                    words.append(character)
                open_word = not alone
            elif kind[0] == "M" and words:
                words[-1] += character
            elif kind != "Cf":  # format characters join letters
                open_word = False
                if self.symbols and kind[0] in "PS":
                    words.append(character)
        return words


def rouge(guesses: Sequence[str], truths: Sequence[str]) -> dict[str, Tensor]:
    """Return the F-measures of ROUGE-1, ROUGE-2 and ROUGE-L of each guess, in [0, 1].

    As published, it uses lower case, words of letters and digits, and no stemming. Unlike the
    original, it supports any script. If a truth has no words, e.g. only emoji, its visible
    characters are the words. The result is NaN for a truth without visible characters, and for
    ROUGE-2 also for a truth with only one word.

    References:
        Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004,
        https://aclanthology.org/W04-1013
    """
    from rouge_score import rouge_scorer  # slow to import

    rows = []
    for guess, truth in zip(guesses, truths, strict=True):
        words = _Words() if _Words().tokenize(truth) else _Words(symbols=True)
        scores = rouge_scorer.RougeScorer([*_LEAST_WORDS], tokenizer=words).score(truth, guess)
        count = len(words.tokenize(truth))
        rows.append(
            [
                scores[kind].fmeasure if count >= least else torch.nan
                for kind, least in _LEAST_WORDS.items()
            ]
        )
    values = torch.tensor(rows, dtype=torch.float64).reshape(-1, len(_LEAST_WORDS))
    return dict(zip(_LEAST_WORDS, values.T, strict=True))
