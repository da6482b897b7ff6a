#!/usr/bin/env python3
"""Train a small neural network on `data/moons.csv` with nothing but the standard library.

Prints a line for each epoch, then the accuracy on points that it has not seen, and writes `results/model.json`
and `results/report.txt`. It refuses to train on data whose SHA-256 is not the one in `data/SHA256SUMS`: it then
ends with status 3, so that a broken transfer can never pass for a result. The network is 2-12-1 with tanh,
trained by stochastic gradient descent; same data and seed, same model to the last digit.
"""

import argparse
import csv
import hashlib
import json
import math
import random
import sys
import time
from pathlib import Path

EXIT_CORRUPTED = 3
HIDDEN = 12
EPOCHS = 250
RATE = 0.08
SEED = 7
TEST_SHARE = 0.2

Row = tuple[float, float, int]


class CorruptedData(Exception):
    """The data is not what it was when it was shipped."""


class Network:
    """Two inputs, one hidden layer of tanh, one logistic output."""

    def __init__(self, source: random.Random) -> None:
        self.inner = [[source.gauss(0.0, 0.8) for _ in range(3)] for _ in range(HIDDEN)]
        self.outer = [source.gauss(0.0, 0.4) for _ in range(HIDDEN + 1)]

    def probability(self, x: float, y: float) -> float:
        """Return the probability, 0 to 1, that the point is of class 1."""
        return _logistic(self._score([math.tanh(a * x + b * y + c) for a, b, c in self.inner]))

    def learn(self, x: float, y: float, label: int, rate: float) -> float:
        """Take one step down the gradient of the cross-entropy, and return the loss before it."""
        hidden = [math.tanh(a * x + b * y + c) for a, b, c in self.inner]
        probability = _logistic(self._score(hidden))
        error = probability - label
        for index, value in enumerate(hidden):
            step = rate * error * self.outer[index] * (1.0 - value * value)
            weights = self.inner[index]
            weights[0] -= step * x
            weights[1] -= step * y
            weights[2] -= step
            self.outer[index] -= rate * error * value
        self.outer[HIDDEN] -= rate * error
        return -math.log(max(probability if label else 1.0 - probability, 1e-12))

    def _score(self, hidden: list[float]) -> float:
        return sum(w * v for w, v in zip(self.outer, hidden, strict=False)) + self.outer[HIDDEN]


def _logistic(score: float) -> float:
    return 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, score))))


def read_data(path: Path) -> list[Row]:
    """Return the points of a CSV file whose checksum stands in SHA256SUMS beside it. Raises CorruptedData."""
    try:
        content = path.read_bytes()
        sums = (path.parent / "SHA256SUMS").read_text()
    except (OSError, UnicodeDecodeError) as problem:
        raise CorruptedData(f"it cannot be read: {problem}") from problem
    expected = {name: digest for digest, name in (line.split() for line in sums.splitlines() if line.count("  "))}
    actual = hashlib.sha256(content).hexdigest()
    if expected.get(path.name) != actual:
        raise CorruptedData(f"its SHA-256 is {actual}, not {expected.get(path.name, 'listed in SHA256SUMS')}")
    lines = csv.DictReader(content.decode().splitlines())
    return [(float(line["x"]), float(line["y"]), int(line["label"])) for line in lines]


def accuracy(network: Network, rows: list[Row]) -> float:
    """Return the share of `rows` that the network puts in the right class."""
    return sum((network.probability(x, y) >= 0.5) == (label == 1) for x, y, label in rows) / len(rows)


def train(rows: list[Row], epochs: int) -> tuple[Network, float, float]:
    """Return the trained network and its accuracy on the points it learned from and on those held back."""
    source = random.Random(SEED)  # noqa: S311 - reproducible training, not secrecy
    held_back, learned = rows[: int(len(rows) * TEST_SHARE)], rows[int(len(rows) * TEST_SHARE) :]
    network = Network(source)
    for epoch in range(1, epochs + 1):
        source.shuffle(learned)
        rate = RATE / (1.0 + epoch / epochs)
        loss = sum(network.learn(x, y, label, rate) for x, y, label in learned) / len(learned)
        if epoch == 1 or epoch % 25 == 0 or epoch == epochs:
            print(
                f"epoch {epoch:3d}/{epochs}  loss {loss:.4f}  accuracy {accuracy(network, held_back):.3f}",
                flush=True,
            )
    return network, accuracy(network, learned), accuracy(network, held_back)


def main() -> int:
    """Run the job and return its exit status."""
    parser = argparse.ArgumentParser(description="Train a small classifier with the standard library.")
    parser.add_argument("--data", type=Path, default=Path("data/moons.csv"))
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    options = parser.parse_args()
    started = time.monotonic()
    try:
        rows = read_data(options.data)
    except CorruptedData as problem:
        print(f"error: {options.data} is corrupted: {problem}", file=sys.stderr)
        print("nothing was trained, and no result was written", file=sys.stderr)
        return EXIT_CORRUPTED
    print(f"{len(rows)} points read, checksum good", flush=True)
    network, learned, held_back = train(rows, options.epochs)
    options.results.mkdir(parents=True, exist_ok=True)
    model = {"inner": network.inner, "outer": network.outer, "accuracy": held_back}
    (options.results / "model.json").write_text(json.dumps(model, indent=1) + "\n")
    report = (
        f"points            {len(rows)}\n"
        f"accuracy, learned {learned:.4f}\n"
        f"accuracy, unseen  {held_back:.4f}\n"
        f"seconds           {time.monotonic() - started:.1f}\n"
    )
    (options.results / "report.txt").write_text(report)
    print(f"accuracy on unseen points: {held_back:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
