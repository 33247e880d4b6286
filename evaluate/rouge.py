"""ROUGE of reconstructed texts, by the package rouge-score."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

_WORDS = re.compile(r"[a-z0-9]+")
_LEAST_WORDS = {"rouge1": 1, "rouge2": 2, "rougeL": 1}


def rouge(guesses: Sequence[str], truths: Sequence[str]) -> dict[str, Tensor]:
    """Return the F-measures of ROUGE-1, ROUGE-2 and ROUGE-L of each guess, in [0, 1].

    As published: lower case, words of letters and digits of English, no stemming. NaN for a truth
    that has no such word, or too few for ROUGE-2: another script's text has no score.

    References:
        Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004,
        https://aclanthology.org/W04-1013
    """
    from rouge_score import rouge_scorer  # slow to import

    scorer = rouge_scorer.RougeScorer([*_LEAST_WORDS], use_stemmer=False)
    rows = []
    for guess, truth in zip(guesses, truths, strict=True):
        words, scores = len(_WORDS.findall(truth.lower())), scorer.score(truth, guess)
        rows.append(
            [
                scores[kind].fmeasure if words >= least else torch.nan
                for kind, least in _LEAST_WORDS.items()
            ]
        )
    values = torch.tensor(rows, dtype=torch.float64).reshape(-1, len(_LEAST_WORDS))
    return dict(zip(_LEAST_WORDS, values.T, strict=True))
