"""What the owner says stands: lending stays switched as it was, and stopping waits for no results."""

from support.daemons import Daemons

from node.rpc.api import Nothing
from node.rpc.methods import jobs, lend
from node.rpc.methods.daemon import STOP, StopMode, StopParams


def test_lending_stays_as_it_was_switched_across_restarts(daemons: Daemons) -> None:
    provider = daemons.provider()
    assert provider.call(lend.STATUS, Nothing()).state is lend.LendState.ON
    provider.call(lend.OFF, lend.DevicesParams())
    provider.kill()
    provider.start()
    assert provider.call(lend.STATUS, Nothing()).state is lend.LendState.OFF
    provider.call(lend.ON, lend.DevicesParams())
    provider.call(lend.OFF, lend.DevicesParams(devices=("SIMULATED-0000",)))
    provider.kill()
    provider.start()
    status = provider.call(lend.STATUS, Nothing())
    assert status.state is lend.LendState.ON
    assert "switched off" in status.devices[0].problem
    provider.call(lend.ON, lend.DevicesParams())
    assert provider.wait_for(lambda: provider.devices()[0].use is lend.DeviceUse.OFFERED)


def test_a_stop_now_ends_jobs_and_does_not_wait_for_results_that_nobody_collects(daemons: Daemons) -> None:
    provider, renter = daemons.provider(), daemons.renter()
    renter.connect(provider)
    renter.wait_offers()
    job = renter.run(
        "/bin/sh", "-c", "echo x > r; exec sleep 600", outputs=(jobs.JobOutput(remote="r", local="/proc/r/r"),)
    )
    renter.wait_running(job)
    provider.call(STOP, StopParams(mode=StopMode.NOW))
    process = provider.process
    assert process is not None
    assert process.wait(60) == 0
