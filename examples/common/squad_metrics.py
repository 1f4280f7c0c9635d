"""Exact match and F1 of answers to SQuAD 1.1, by the formulas of the published evaluation.

    python squad_metrics.py dev-v1.1.json predictions.json

An answer is compared without case, punctuation, the words a, an and the, and superfluous spaces. Each question counts
with the best of its given answers, and an unanswered question counts 0.
"""

import collections
import json
import re
import string
import sys


def normalize_answer(text):
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match_score(prediction, answer):
    return float(normalize_answer(prediction) == normalize_answer(answer))


def f1_score(prediction, answer):
    """The harmonic mean of precision and recall of the words."""
    found, wanted = normalize_answer(prediction).split(), normalize_answer(answer).split()
    common = sum((collections.Counter(found) & collections.Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def best_score(metric, prediction, answers):
    return max(metric(prediction, answer) for answer in answers)


def evaluate(dataset, predictions):
    """``{"exact_match": percent, "f1": percent}``. dataset: the ``data`` of a file of SQuAD 1.1. predictions: the text
    of each answer by the id of its question."""
    scores, unanswered = [], 0
    for question in (qa for article in dataset for text in article["paragraphs"] for qa in text["qas"]):
        answers, prediction = [answer["text"] for answer in question["answers"]], predictions.get(question["id"])
        unanswered += prediction is None
        metrics = (exact_match_score, f1_score)
        scores.append([0.0 if prediction is None else best_score(one, prediction, answers) for one in metrics])
    if unanswered:
        print(f"{unanswered} of {len(scores)} questions have no prediction and count 0", file=sys.stderr)
    exact, f1 = (100.0 * sum(one) / max(1, len(scores)) for one in (zip(*scores) if scores else ((), ())))
    return {"exact_match": exact, "f1": f1}


def main(paths):
    found = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            found.append(json.load(file))
    print(json.dumps(evaluate(found[0]["data"], found[1])))


if __name__ == "__main__":
    main(sys.argv[1:3])
