"""Scores of generated sentences against references: BLEU, ROUGE-L, METEOR, NIST and CIDEr.

A score function takes the generated sentences and one or more references for each of them. BLEU,
ROUGE-L and METEOR come from sacrebleu, rouge-score and nltk. NIST follows mteval-v13a and CIDEr
follows pycocoevalcap, as in the E2E challenge. METEOR, NIST and CIDEr use lower-case words and
punctuation marks, split by the rules of mteval-v13a.
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
from fedmuon.core.extras import installing
from fedmuon.core.files import read_text

Sentences = Sequence[str]
References = Sequence[Sentences]  # the references of each sentence
Words = tuple[str, ...]
NIST_WORDS, CIDER_WORDS = 5, 4  # maximum length of n-grams
HALF_AT = 2 / 3  # length ratio at which NIST's brevity factor is 1/2
SIGMA = 6.0  # width of CIDEr's length penalty


def bleu(written: Sentences, references: References) -> float:
    """Return the BLEU score of the whole corpus in percent.

    sacrebleu computes the score with effective order.
    """
    try:  # optional dependency
        from sacrebleu.metrics.bleu import BLEU
    except ImportError:
        raise InputError(
            f"BLEU needs sacrebleu, which is not installed. Run {installing('text')}."
        ) from None
    max_references = max(map(len, references))
    columns: list[Any] = [
        [several[k] if k < len(several) else None for several in references]
        for k in range(max_references)
    ]
    return float(BLEU(effective_order=True).corpus_score(list(written), columns).score)


def rouge_l(written: Sentences, references: References) -> float:
    """Return the mean ROUGE-L score in percent, computed by rouge-score.

    The score is F1 of stemmed words. Each sentence is compared with the reference that has the
    highest score.
    """
    try:  # optional dependency
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise InputError(
            f"ROUGE-L needs rouge-score, which is not installed. Run {installing('text')}."
        ) from None
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    nearest = [
        max(scorer.score(reference, sentence)["rougeL"].fmeasure for reference in several)
        for sentence, several in zip(written, references, strict=True)
    ]
    return 100 * sum(nearest) / len(nearest)


class _NoSynonyms:
    """A replacement for WordNet, which nltk would have to download."""

    def synsets(self, word: str) -> tuple[()]:
        """Return no synonyms."""
        return ()


def meteor(written: Sentences, references: References) -> float:
    """Return the mean METEOR score, from 0 to 1, computed by nltk.

    The score of a sentence is the score for its best reference.

    Words match exactly or by their stems (Porter). Synonyms do not match, because WordNet is not
    used. The constants alpha = 0.9, beta = 3 and gamma = 0.5 are those of METEOR in 2007. The
    values differ from METEOR 1.5 of the E2E challenge. METEOR 1.5 also matches synonyms and
    paraphrases, gives function words less weight, and uses other constants.
    """
    try:  # optional dependency
        from nltk.translate.meteor_score import meteor_score
    except ImportError:
        raise InputError(
            f"METEOR needs nltk, which is not installed. Run {installing('text')}."
        ) from None
    nearest = [
        meteor_score([_words(ref) for ref in several], _words(sentence), wordnet=_NoSynonyms())  # type: ignore[arg-type]
        for sentence, several in zip(written, references, strict=True)
    ]
    return float(sum(nearest) / len(nearest))


def nist(written: Sentences, references: References) -> float:
    """Return the NIST score of the whole corpus, as computed by mteval-v13a without regard to case.

    A matched n-gram has the weight log2(a / b). Here, b counts the n-gram in the references, and a
    counts its first n - 1 words. A sentence of fewer than n words has no n-gram.
    """
    counts: list[Counter[Words]] = [Counter() for _ in range(NIST_WORDS + 1)]
    matches, total, length = [Counter[Words]() for _ in range(NIST_WORDS)], [0] * NIST_WORDS, 0.0
    for sentence, several in zip(written, references, strict=True):
        tokens, reference_tokens = _words(sentence), [_words(reference) for reference in several]
        length += sum(map(len, reference_tokens)) / len(reference_tokens)
        counts[0][()] += sum(map(len, reference_tokens))
        for n in range(1, NIST_WORDS + 1):
            grams, reference_grams = (
                Counter(_grams(tokens, n)),
                [Counter(_grams(words, n)) for words in reference_tokens],
            )
            total[n - 1] += grams.total()
            max_counts: Counter[Words] = Counter()
            for gram_counts in reference_grams:
                counts[n].update(gram_counts)
                max_counts |= gram_counts  # the maximum count in a single reference
            matches[n - 1].update(grams & max_counts)
    terms = (
        sum(
            count * math.log2(counts[n - 1][gram[:-1]] / counts[n][gram])
            for gram, count in hits.items()
        )
        / max(1, among)
        for n, (hits, among) in enumerate(zip(matches, total, strict=True), 1)
    )
    return sum(terms) * _brevity(total[0] / length if length else 1.0)


def _brevity(ratio: float) -> float:
    """Return the brevity factor for a length ratio.

    The factor is 1 for ratios of at least 1, 1/2 for the ratio 2/3, and smaller for smaller ratios.
    """
    if ratio <= 0:
        return 0.0
    return math.exp(math.log(0.5) * (math.log(min(1.0, ratio)) / math.log(HALF_AT)) ** 2)


def cider(written: Sentences, references: References) -> float:
    """Return the mean CIDEr-D score, from 0 to 10, as computed by pycocoevalcap.

    The score of a sentence is the mean cosine of its n-gram counts and those of its references, for
    n-grams of 1 to 4 words. Rare n-grams have more weight. An n-gram that occurs in the references
    of every sentence has weight 0. A single sentence therefore has the score 0.
    """
    counts = [[_counts(reference) for reference in several] for several in references]
    sentences = Counter(gram for several in counts for gram in set(chain(*several)))
    weights = {gram: math.log(len(counts) / count) for gram, count in sentences.items()}
    rare = math.log(max(1, len(counts)))  # the weight of an n-gram that is in no reference
    scores = []
    for candidate, several in zip(map(_counts, written), counts, strict=True):
        near = [_likeness(candidate, reference, weights, rare) for reference in several]
        scores.append(10 * sum(near) / len(near))
    return sum(scores) / len(scores)


def _counts(sentence: str) -> Counter[Words]:
    """Count all n-grams of a sentence without its punctuation marks."""
    words = [word for word in _words(sentence) if word.strip(punctuation)]
    return Counter(gram for n in range(1, CIDER_WORDS + 1) for gram in _grams(words, n))


def _likeness(
    candidate: Counter[Words],
    reference: Counter[Words],
    weights: Mapping[Words, float],
    rare: float,
) -> float:
    """Return the mean cosine of the weighted n-gram counts of two sentences.

    A factor reduces the mean if the sentences differ in length.
    """
    total = 0.0
    for n in range(1, CIDER_WORDS + 1):
        x, y = (
            {
                gram: count * weights.get(gram, rare)
                for gram, count in grams.items()
                if len(gram) == n
            }
            for grams in (candidate, reference)
        )
        norms = math.hypot(*x.values()) * math.hypot(*y.values())
        shared = (min(x[gram], value) * value for gram, value in y.items() if gram in x)
        total += sum(shared) / norms if norms else 0.0
    # As in pycocoevalcap, the length is the number of 2-grams.
    longer = sum(
        sign * count
        for sign, grams in ((1, candidate), (-1, reference))
        for gram, count in grams.items()
        if len(gram) == 2
    )
    return math.exp(-(longer**2) / (2 * SIGMA**2)) * total / CIDER_WORDS


def _grams(words: Sequence[str], n: int) -> list[Words]:
    return [tuple(words[k : k + n]) for k in range(len(words) - n + 1)]


@lru_cache(maxsize=1)
def _tokenizer() -> Callable[[str], str]:
    try:  # optional dependency
        from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
    except ImportError:
        raise InputError(
            f"Scores need sacrebleu, which is not installed. Run {installing('text')}."
        ) from None
    return Tokenizer13a()


def _words(sentence: str) -> list[str]:
    """Split a sentence into lower-case words and punctuation marks."""
    return _tokenizer()(sentence.lower()).split()


SCORES: dict[str, Callable[[Sentences, References], float]] = {
    "bleu": bleu, "rouge_l": rouge_l, "meteor": meteor, "nist": nist, "cider": cider,
}  # fmt: skip
SHOWN = {  # score -> its name and its unit
    "bleu": ("BLEU", "points"), "rouge_l": ("ROUGE-L", "points"), "meteor": ("METEOR", ""),
    "nist": ("NIST", ""), "cider": ("CIDEr", ""),
}  # fmt: skip


def scores_of_files(written: str | Path, references: str | Path) -> dict[str, float]:
    """Return the scores of the sentences in a file, as a dictionary of names and values.

    Args:
        written: A text file with one sentence per line.
        references: A text file with one reference per line, and an empty line between the
            references of two sentences, as in the E2E challenge.

    Raises:
        InputError: If a file cannot be read, or the files have different numbers of sentences.
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
            f"{written} has {len(lines)} lines, but {references} has references for "
            f"{len(groups)} sentences. Write one line per sentence (an empty line if there is no "
            "text), and separate the references of different sentences by an empty line."
        )
    return {name: score(lines, groups) for name, score in SCORES.items()}


def _lines(file: str | Path) -> list[str]:
    try:
        text = read_text(Path(file).expanduser(), "utf-8-sig")
    except (OSError, ValueError) as error:
        advice = "check its path" if isinstance(error, OSError) else "save the file as UTF-8"
        raise InputError(f"{file} cannot be read as UTF-8 text ({error}): {advice}") from None
    return text.removesuffix("\n").split("\n") if text else []
