"""Scores of written sentences against references: BLEU, ROUGE-L, METEOR, NIST and CIDEr.

A score takes the written sentences and, for each, one reference or more. BLEU, ROUGE-L and METEOR
are those of sacrebleu, rouge-score and nltk. NIST follows mteval-v13a and CIDEr follows
pycocoevalcap, as the metrics of the E2E challenge do. These last two and METEOR read lower-case
words and punctuation marks, cut by the rules of mteval-v13a.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from string import punctuation
from typing import Any

from fedmuon.core.errors import InputError
from fedmuon.core.files import read_text

Sentences = Sequence[str]
References = Sequence[Sentences]  # the references of each sentence
Words = tuple[str, ...]
NIST_WORDS, CIDER_WORDS = 5, 4  # the longest n-grams
HALF_AT = 2 / 3  # length ratio at which NIST's brevity factor is 1/2
SIGMA = 6.0  # width of CIDEr's length penalty


def bleu(written: Sentences, references: References) -> float:
    """Corpus BLEU in percent by sacrebleu with effective order."""
    try:  # an optional package
        from sacrebleu.metrics.bleu import BLEU
    except ImportError:
        raise InputError(
            "BLEU needs sacrebleu, which is not installed: pip install 'fedmuon[text]'"
        ) from None
    most = max(map(len, references))
    columns: list[Any] = [
        [several[k] if k < len(several) else None for several in references] for k in range(most)
    ]
    return float(BLEU(effective_order=True).corpus_score(list(written), columns).score)


def rouge_l(written: Sentences, references: References) -> float:
    """Mean ROUGE-L (F1, stemmed) in percent by rouge-score, of the nearest reference each."""
    try:  # an optional package
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise InputError(
            "ROUGE-L needs rouge-score, which is not installed: pip install 'fedmuon[text]'"
        ) from None
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    nearest = [
        max(scorer.score(one, sentence)["rougeL"].fmeasure for one in several)
        for sentence, several in zip(written, references, strict=True)
    ]
    return 100 * sum(nearest) / len(nearest)


class _NoSynonyms:
    """Stands for WordNet, which nltk would have to download."""

    def synsets(self, word: str) -> tuple[()]:
        """No word has a synonym."""
        return ()


def meteor(written: Sentences, references: References) -> float:
    """Mean METEOR by nltk, of the nearest reference each, from 0 to 1.

    Words match exactly or by their stems (Porter), not by synonyms: there is no WordNet. Constants
    are those of 2007 (0.9, 3, 0.5). METEOR 1.5 of the E2E challenge also matches synonyms and
    paraphrases, weighs function words less, and has other constants, so its values differ.
    """
    try:  # an optional package
        from nltk.translate.meteor_score import meteor_score
    except ImportError:
        raise InputError(
            "METEOR needs nltk, which is not installed: pip install 'fedmuon[text]'"
        ) from None
    nearest = [
        meteor_score([_words(one) for one in several], _words(one), wordnet=_NoSynonyms())  # type: ignore[arg-type]
        for one, several in zip(written, references, strict=True)
    ]
    return float(sum(nearest) / len(nearest))


def nist(written: Sentences, references: References) -> float:
    """Corpus NIST of n-grams up to 5 words (mteval-v13a, without a case).

    A matched n-gram counts by its information in the references, log2 of how often its beginning
    occurs for each time that it does. A sentence of fewer than n words has no n-gram.
    """
    counts: list[Counter[Words]] = [Counter() for _ in range(NIST_WORDS + 1)]
    found, total, length = [Counter[Words]() for _ in range(NIST_WORDS)], [0] * NIST_WORDS, 0.0
    for one, several in zip(written, references, strict=True):
        mine, theirs = _words(one), [_words(each) for each in several]
        length += sum(map(len, theirs)) / len(theirs)
        counts[0][()] += sum(map(len, theirs))
        for n in range(1, NIST_WORDS + 1):
            own, known = Counter(_grams(mine, n)), [Counter(_grams(each, n)) for each in theirs]
            total[n - 1] += own.total()
            most: Counter[Words] = Counter()
            for each in known:
                counts[n].update(each)
                most |= each  # the largest count in one reference
            found[n - 1].update(own & most)
    terms = (
        sum(
            many * math.log2(counts[n - 1][gram[:-1]] / counts[n][gram])
            for gram, many in hits.items()
        )
        / max(1, among)
        for n, (hits, among) in enumerate(zip(found, total, strict=True), 1)
    )
    return sum(terms) * _brevity(total[0] / length if length else 1.0)


def _brevity(ratio: float) -> float:
    """The factor for what is shorter than the references: 1 at their length, 1/2 at two thirds."""
    if ratio <= 0:
        return 0.0
    return math.exp(math.log(0.5) * (math.log(min(1.0, ratio)) / math.log(HALF_AT)) ** 2)


def cider(written: Sentences, references: References) -> float:
    """Mean CIDEr-D of n-grams up to 4 words, from 0 to 10 (pycocoevalcap).

    Cosines of counts that weigh rare n-grams more, averaged over the references. An n-gram that
    the references of every sentence have weighs nothing, so the score of a single sentence is 0.
    """
    theirs = [[_counts(one) for one in several] for several in references]
    sentences = Counter(gram for several in theirs for gram in set(chain(*several)))
    weights = {gram: math.log(len(theirs) / many) for gram, many in sentences.items()}
    rare = math.log(max(1, len(theirs)))  # the weight of what no reference has
    scores = []
    for one, several in zip(map(_counts, written), theirs, strict=True):
        near = [_likeness(one, each, weights, rare) for each in several]
        scores.append(10 * sum(near) / len(near))
    return sum(scores) / len(scores)


def _counts(sentence: str) -> Counter[Words]:
    """All n-grams of a sentence without its punctuation marks."""
    words = [word for word in _words(sentence) if word.strip(punctuation)]
    return Counter(gram for n in range(1, CIDER_WORDS + 1) for gram in _grams(words, n))


def _likeness(
    one: Counter[Words], other: Counter[Words], weights: Mapping[Words, float], rare: float
) -> float:
    """The mean over n of the cosines of weighted counts, less where the lengths differ."""
    total = 0.0
    for n in range(1, CIDER_WORDS + 1):
        mine, theirs = (
            {gram: many * weights.get(gram, rare) for gram, many in held.items() if len(gram) == n}
            for held in (one, other)
        )
        norms = math.hypot(*mine.values()) * math.hypot(*theirs.values())
        shared = (min(mine[gram], value) * value for gram, value in theirs.items() if gram in mine)
        total += sum(shared) / norms if norms else 0.0
    # The length is the number of pairs of words, as in pycocoevalcap.
    longer = sum(
        sign * many
        for sign, held in ((1, one), (-1, other))
        for gram, many in held.items()
        if len(gram) == 2
    )
    return math.exp(-(longer**2) / (2 * SIGMA**2)) * total / CIDER_WORDS


def _grams(words: Sequence[str], n: int) -> list[Words]:
    return [tuple(words[k : k + n]) for k in range(len(words) - n + 1)]


@lru_cache(maxsize=1)
def _tokenizer() -> Callable[[str], str]:
    try:  # an optional package
        from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
    except ImportError:
        raise InputError(
            "Scores need sacrebleu, which is not installed: pip install 'fedmuon[text]'"
        ) from None
    return Tokenizer13a()


def _words(sentence: str) -> list[str]:
    """The lower-case words and punctuation marks."""
    return _tokenizer()(sentence.lower()).split()


SCORES: dict[str, Callable[[Sentences, References], float]] = {
    "bleu": bleu, "rouge_l": rouge_l, "meteor": meteor, "nist": nist, "cider": cider,
}  # fmt: skip
SHOWN = {  # the name of each score, and its unit
    "bleu": ("BLEU", "points"), "rouge_l": ("ROUGE-L", "points"), "meteor": ("METEOR", ""),
    "nist": ("NIST", ""), "cider": ("CIDEr", ""),
}  # fmt: skip


def scores_of_files(written: str | Path, references: str | Path) -> dict[str, float]:
    """Score the sentences of a file, by name.

    Args:
        written: A text file with a sentence in each line.
        references: A text file with the references of each sentence in lines, and an empty line
            between those of two sentences, as in the E2E challenge.

    Raises:
        InputError: If a file cannot be read, or their numbers of sentences differ.
    """
    lines = _lines(written)
    groups: list[list[str]] = [[]]
    for line in _lines(references):
        if line.strip():
            groups[-1].append(line.strip())
        elif groups[-1]:
            groups.append([])
    groups = [group for group in groups if group]
    if not groups or len(lines) != len(groups):
        raise InputError(
            f"{written} has {len(lines)} lines, but {references} has references of {len(groups)} "
            "sentences. Write one line per group of references, also an empty one, and an empty "
            "line between groups."
        )
    return {name: score(lines, groups) for name, score in SCORES.items()}


def _lines(file: str | Path) -> list[str]:
    try:
        text = read_text(Path(file).expanduser(), "utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(
            f"{file} cannot be read as UTF-8 text ({error}): check the path, and save it as UTF-8"
        ) from None
    return text.removesuffix("\n").split("\n") if text else []
