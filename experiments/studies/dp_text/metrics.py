"""How near generated sentences come to those that people wrote: BLEU and ROUGE-L as in 000."""

from collections.abc import Sequence
from typing import Any

from fedmuon.core.errors import InputError


def bleu(written: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Corpus BLEU in percent by sacrebleu with effective order; several references a sentence."""
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError:
        raise InputError("BLEU needs sacrebleu: pip install 'fedmuon[text]'") from None
    most = max(map(len, references))
    columns: list[Any] = [
        [several[k] if k < len(several) else None for several in references] for k in range(most)
    ]
    return float(BLEU(effective_order=True).corpus_score(list(written), columns).score)


def rouge_l(written: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Mean ROUGE-L (F1, stemmed) in percent by rouge-score, of the nearest reference each."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise InputError("ROUGE-L needs rouge-score: pip install 'fedmuon[text]'") from None
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    nearest = [
        max(scorer.score(one, sentence)["rougeL"].fmeasure for one in several)
        for sentence, several in zip(written, references, strict=True)
    ]
    return 100 * sum(nearest) / len(nearest)
