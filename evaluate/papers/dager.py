"""DAGER: exact text from gradients, with the numbers of table 7 of SOMP."""

from __future__ import annotations

from .somp import METRICS, procedures, text_trial
from .table import Row, Table

_ROUGE: dict[str, dict[int, tuple[float, float]]] = {
    "cola": {1: (100, 100), 2: (100, 100), 4: (100, 95.6), 8: (99.6, 96.2)},
    "sst2": {1: (100, 96.0), 2: (100, 89.5), 4: (100, 92.8), 8: (100, 92.9)},
    "imdb": {1: (99.5, 94.0), 2: (87.2, 78.8), 4: (86.4, 71.6), 8: (68.2, 42.5)},
}

TABLES = (
    Table(
        name="dager",
        title="Exact reconstruction of texts by DAGER",
        reference=(
            "Petrov, Dimitrov, Baader, Mueller, Vechev. DAGER: Exact Gradient Inversion for Large "
            "Language Models. NeurIPS 2024. https://arxiv.org/abs/2405.15586; numbers of GPT-2 "
            "from Li, Li, SOMP, 2026, table 7. https://arxiv.org/abs/2603.16761"
        ),
        datasets=dict.fromkeys(_ROUGE, None),
        metrics=METRICS,
        rows=[
            Row(
                {"dataset": data, "B": size},
                {"rouge1": rouge1 / 100, "rouge2": rouge2 / 100},
                trials=3,
            )
            for data, rows in _ROUGE.items()
            for size, (rouge1, rouge2) in rows.items()
        ],
        trial=text_trial,
        procedures=procedures("DAGER"),
        quick=2,
        notes=(
            "The paper attacks a fine-tuned GPT-2. Ours is SmolLM2-135M, or with --procedure gpt2 "
            "a model of GPT-2's size with new weights. IMDB is cut to 128 tokens."
        ),
    ),
)
