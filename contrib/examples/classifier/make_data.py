#!/usr/bin/env python3
"""Make `data/moons.csv`: two interleaved half circles with noise, 1,500 points, always the same bytes.

It is here so that the data set can be checked and made again; the job itself only reads the file. The shape is
the classic "two moons": no straight line separates the classes, so a classifier has to learn a curve.
"""

import hashlib
import math
import random
from pathlib import Path

POINTS = 1500
NOISE = 0.22
SEED = 20240229


def main() -> None:
    """Write the data and its checksum beside this program."""
    source = random.Random(SEED)  # noqa: S311 - a data set wants a seed, not secrecy
    rows = []
    for number in range(POINTS):
        label = number % 2
        angle = source.uniform(0.0, math.pi)
        x = math.cos(angle) if label == 0 else 1.0 - math.cos(angle)
        y = math.sin(angle) if label == 0 else 0.5 - math.sin(angle)
        rows.append(f"{x + source.gauss(0.0, NOISE):.5f},{y + source.gauss(0.0, NOISE):.5f},{label}")
    source.shuffle(rows)
    folder = Path(__file__).parent / "data"
    folder.mkdir(exist_ok=True)
    content = ("x,y,label\n" + "\n".join(rows) + "\n").encode()
    (folder / "moons.csv").write_bytes(content)
    (folder / "SHA256SUMS").write_text(f"{hashlib.sha256(content).hexdigest()}  moons.csv\n")


if __name__ == "__main__":
    main()
