"""What the campaign of kills says in the end: the table, the object, and the exit status."""

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from support.killing import Kill, Round

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
SEED = 7


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    import _campaign

    return _campaign


def a_round(campaign: ModuleType, outcome: str = "completed", lost_s: float = 1.0, kills: int = 1) -> object:
    told = tuple(Kill("provider", 0.5, "running", 2.0, 0.25) for _ in range(kills))
    entry = SimpleNamespace(outcome=outcome)
    return campaign.Held(Round(entry, told, 4.0 + lost_s, ()), lost_s)  # type: ignore[arg-type]


def sides_of(campaign: ModuleType, monkeypatch: pytest.MonkeyPatch, problem: str = "") -> None:
    """Let rounds be made up instead of run."""

    def run(side: object) -> None:
        side.held = [  # type: ignore[attr-defined]
            a_round(campaign, lost_s=1.0),
            a_round(campaign, lost_s=3.0, kills=2),
            a_round(campaign, "keeper_died", lost_s=9.0),
        ]
        side.problems = [problem] if problem else []  # type: ignore[attr-defined]

    monkeypatch.setattr(campaign.Side, "run", run)
    monkeypatch.setattr(campaign.signal, "signal", lambda number, action: None)  # this process is not a campaign's


def test_the_last_line_is_an_object_for_programs(
    campaign: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sides_of(campaign, monkeypatch)
    monkeypatch.setattr("sys.argv", ["campaign", "kill", "--rounds", "3", "--seed", str(SEED), "--side", "both"])
    assert campaign.main() == 0
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert (result["seed"], result["rounds"], result["kills"]) == (SEED, 3, 4)
    assert (result["completed"], result["keeper_died"], result["not_held"]) == (2, 1, 0)
    assert (result["gaps"], result["receipts_equal"], result["left_behind"]) == (0, True, [])
    side = result["sides"]["both"]
    assert (side["lost_s_median"], side["lost_s_max"], side["met_s_max"]) == (3.0, 9.0, 0.2)
    assert "running 4" in table[-1]


def test_what_did_not_hold_is_the_exit_status(
    campaign: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sides_of(campaign, monkeypatch, problem="both 2: the log has a gap")
    monkeypatch.setattr("sys.argv", ["campaign", "kill", "--quick"])
    assert campaign.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("did not hold: both 2: the log has a gap") == len(campaign.SIDES)
    assert json.loads(lines[-1])["not_held"] == len(campaign.SIDES)


def test_a_sides_choices_depend_on_the_seed_and_its_name_only(campaign: ModuleType) -> None:
    def drawn(name: str, seed: int) -> float:
        return float(campaign.Side(name, 1, seed).choose.random())

    assert drawn("both", SEED) == drawn("both", SEED)
    assert len({drawn("both", SEED), drawn("both", SEED + 1), drawn("renter", SEED)}) == 3
