"""A smoke of the fuzzing campaign: its cases run, repeat, and find a decoder that is broken on purpose."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from protocol import codec
from protocol.errors import MalformedRecord

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
SEED = 1


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    import _fuzz

    return _fuzz


def test_some_cases_of_every_decoder(fuzz: ModuleType) -> None:
    everything = fuzz.targets()
    taken = [fuzz.run_case(number, SEED, everything) for number in range(40 * len(everything))]
    assert 0.05 < sum(taken) / len(taken) < 0.6
    again = [fuzz.run_case(number, SEED, everything) for number in range(len(everything))]
    assert again == taken[: len(everything)]


def test_every_decoder_is_fed_something_that_it_takes(fuzz: ModuleType) -> None:
    everything = fuzz.targets()
    silent = {target.name for target in everything} - {"manifest"}
    for number in range(120 * len(everything)):
        target = everything[number % len(everything)]
        if target.name in silent and fuzz.run_case(number, SEED, everything):
            silent.remove(target.name)
    assert silent == set()


@pytest.mark.parametrize("error", [RuntimeError("a bug"), MalformedRecord("x" * 5000), MalformedRecord("\x1b[2J")])
def test_a_broken_decoder_is_found(
    fuzz: ModuleType, error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(tree: Any, record_type: Any) -> Any:
        raise error

    monkeypatch.setattr(codec, "convert_untrusted", broken)
    everything = fuzz.targets()
    with pytest.raises(fuzz.Finding):
        for number in range(10 * len(everything)):
            fuzz.run_case(number, SEED, everything)
    assert f"again: scripts/fuzz --seed {SEED} --case " in capsys.readouterr().out
