"""The `unsafe-process` tier: no isolation at all, for machines whose owner trusts every renter.

A job is an ordinary process group with the keeper's view of the machine; it may read what its uid may read,
use the network and see every process. There is no /job: the job starts in its directory, and relative paths
are all it should use. Refuses to exist unless it is constructed by name: nothing falls back to it.

Where a control group can be made it limits and kills reliably; elsewhere limits hold per process or by
polling, and a process that starts a session of its own and loses its parent escapes the final kill.
"""

import os
import posixpath
import subprocess

import trio

from node.errors import SandboxError, TierUnavailable
from node.ports import Probe, SandboxSpec
from node.sandbox import checks, command, control_group, launch, probing, view
from node.sandbox.hierarchy import Hierarchy, find_hierarchy
from node.sandbox.process_tree import Sessions
from node.sandbox.running import Enter, Group, Job, empty

TIER = "unsafe-process"


class UnsafeProcessSandbox:
    """The tier. Implements `node.ports.Sandbox`."""

    def __init__(
        self, *, hierarchy: Hierarchy | None = None, polled: bool = False, probe_uid: int = 65_534
    ) -> None:
        """Describe the tier. `hierarchy` is looked for when None, unless `polled` refuses control groups."""
        self._hierarchy = hierarchy
        self._polled = polled
        self._probe_uid = probe_uid

    @property
    def tier(self) -> str:
        """Its name in offers."""
        return TIER

    async def probe(self) -> Probe:
        """Run `true`. Never raises for a tier that does not work."""
        uid = self._probe_uid if os.geteuid() == 0 else os.geteuid()
        try:
            status, output = await probing.run(self, uid, ": > probe && echo done")
        except SandboxError as error:
            return Probe(TIER, False, str(error), error.hint)
        except OSError as error:
            return Probe(TIER, False, f"the probe could not be prepared: {error}")
        if (status, output) != (0, "done\n"):
            return Probe(TIER, False, f"the probe ended with {status}: {output.strip()[:400]}")
        return Probe(TIER, True, "a process ran here; nothing keeps it from this machine's files and network")

    async def start(self, spec: SandboxSpec) -> Job:
        """Start a job. Raises SandboxError; nothing is left behind when it does."""
        checks.check(spec)
        directory = _relative(spec.workdir)
        hierarchy = self._find_hierarchy()
        home = checks.open_directory(spec)
        group: Group | None = None
        nothing = os.open("/dev/null", os.O_RDONLY)
        try:
            checks.give_pipes(spec)
            group = control_group.create(hierarchy, spec.name, spec.limits) if hierarchy else Sessions(spec.limits)
            enter = _entrance(spec, group, directory, home)
            first = await enter(spec.argv, nothing, spec.stdout, spec.stderr)
        except BaseException:
            if group is not None:
                with trio.CancelScope(shield=True):
                    await empty(group, spec.name)
            os.close(home)
            raise
        finally:
            os.close(nothing)
        return Job(spec.name, first, group, monitors=frozenset(), enter=enter, release=lambda: os.close(home))

    async def sweep(self, name: str) -> None:
        """Kill and remove whatever a dead keeper left in a control group of that name. Idempotent.

        Without control groups there is nothing by which leftovers could be known.
        """
        checks.check_name(name)
        hierarchy = self._find_hierarchy()
        if hierarchy:
            await empty(await trio.to_thread.run_sync(control_group.find, hierarchy, name), name)

    def _find_hierarchy(self) -> Hierarchy | None:
        if self._hierarchy is None and not self._polled:
            try:
                self._hierarchy = find_hierarchy()
            except TierUnavailable:
                self._polled = True
        return self._hierarchy


def _entrance(spec: SandboxSpec, group: Group, directory: str, home: int) -> Enter:
    """Return what starts commands in the job's group, in `directory` below the open directory `home`."""
    limits = launch.limits(*(checks.resource_limits(spec) if group.polled else []))
    variables = {
        "PATH": launch.PATH,
        "HOME": str(spec.root),
        "LANG": "C.UTF-8",
        **spec.variables,
        **view.device_variables(spec),
    }

    async def enter(argv: tuple[str, ...], stdin: int, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
        process = await command.start(
            argv,
            prefix=limits,
            uid=spec.uid,
            variables=variables,
            directory=directory,
            entries=group.entries,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=f"/proc/self/fd/{home}",
        )
        if isinstance(group, Sessions):
            group.add(process.pid)
        return process

    return enter


def _relative(workdir: str) -> str:
    return posixpath.relpath(view.inside(workdir), view.JOB_DIR)
