"""Whole jobs between two real keepers on loopback."""

import os
from pathlib import Path

import pytest
from support.keeper_pair import JOB_UID, pair

from protocol.machines.lease import COMPLETED, LeasePhase

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="keepers of a provider run jobs under other uids")
pytestmark = needs_root

COPY = """
import os, pathlib, sys
print("uid", os.getuid(), flush=True)
sys.stderr.write("to stderr\\n")
out = pathlib.Path("results"); out.mkdir()
for path in sorted(pathlib.Path("data").rglob("*")):
    if path.is_file():
        (out / path.name).write_bytes(path.read_bytes() * 2)
sys.exit(7)
"""


@pytest.mark.parametrize("isolation", ["bubblewrap", "unsafe-process"])
async def test_job_gets_its_inputs_and_gives_its_outputs(tmp_path: Path, isolation: str) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "one").write_bytes(os.urandom(1_500_000))
    (tmp_path / "in" / "sub" / "two").write_text("two")
    (tmp_path / "extra").write_text("extra")
    inputs = {"data": tmp_path / "in", "data/more/extra": tmp_path / "extra"}
    outputs = {"results": tmp_path / "out", "never": tmp_path / "never"}
    command = ("python3", "-c", COPY)
    with pair(command, inputs=inputs, outputs=outputs, isolation=isolation) as keepers:
        await keepers.start()
        provider, renter = await keepers.finish()
        assert (provider.phase, renter.phase) == (LeasePhase.COLLECTED, LeasePhase.COLLECTED), keepers.renter.log()
        assert (provider.outcome, renter.outcome) == (COMPLETED, COMPLETED)
        assert (provider.exit_status, renter.exit_status, renter.job_end) == (7, 7, "exited")
        one = (tmp_path / "in" / "one").read_bytes()
        assert (tmp_path / "out" / "one").read_bytes() == one * 2
        assert (tmp_path / "out" / "extra").read_text() == "extraextra"
        assert not (tmp_path / "never").exists()
        assert renter.outputs[1].manifest is None
        assert "never" in renter.detail
        uid = 1000 if isolation == "bubblewrap" else JOB_UID
        assert keepers.renter.output().startswith(b"uid ")
        assert str(uid).encode() in keepers.renter.output() or isolation == "bubblewrap"
        assert keepers.renter.output("stderr") == keepers.provider.output("stderr") == b"to stderr\n"
        assert 0 < renter.metered_ms == provider.metered_ms
        assert renter.amount == provider.amount == provider.metered_ms * 1000 <= provider.voucher_amount
        assert await keepers.renter.settle() == 0
        assert await keepers.provider.settle() == 0
        for keeper in (keepers.provider, keepers.renter):
            assert not (keeper.directory / "keys").exists()
            assert keeper.on_disk().phase is LeasePhase.SETTLED
        assert not (keepers.provider.directory / "scratch").exists()
