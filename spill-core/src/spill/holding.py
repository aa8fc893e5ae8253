"""A run's hold on a state: waiting for its holder, claiming it, commits of stages, and what is said when it is lost."""

import contextlib
import shlex
from collections.abc import Iterator

from attrs import evolve

from spill import environment
from spill.alive import Alive, watch
from spill.claim import Claim, stranger
from spill.errors import HeldError, StateError, StoreError
from spill.folder import Folder
from spill.opening import Request, changeable, open_build
from spill.plan import differences, refuse_differences
from spill.plugins import Registry
from spill.records import Commit, Plan, Probe, Run, StageRecord, to_json
from spill.signals import StopRequest
from spill.stages import Reporter, Stage
from spill.table import finished

CLAIM_TRIES = 20


class Hold:
    """One run's way to a state and its place in it.

    `opened` is the state as it was read last, and `before` its commit then: what the build goes on from. `row` is this
    run in the history, `claim` its hold once it is claimed, `working` the stage at work.
    """

    def __init__(self, request: Request, registry: Registry, stop: StopRequest, report: Reporter) -> None:
        self._request = request
        self._registry = registry
        self._stop = stop
        self._report = report
        self._told_of_sweep = False
        self.working: tuple[str, Stage] | None = None
        self._said: set[str] = set()
        self._took_over = ""
        self.notes: list[str] = []
        self.probe: Probe | None = None
        self.row: Run
        self.claim: Claim
        self.open()

    def open(self) -> None:
        """Read the state and the folder, and say what is to be said of them."""
        self.opened = open_build(self._request, self._registry)
        head = self.opened.head
        for line in (*self.opened.folder.warnings, *(head.notes if head else ())):
            if line not in self._said:
                self._report.warn(line)
                self._said.add(line)

    @property
    def before(self) -> Commit | None:
        return self.opened.head.commit if self.opened.head else None

    @property
    def finished(self) -> Commit | None:
        """The last commit, where nothing is left to do."""
        return self.before if self.before and finished(self.before) else None

    # ---- getting it

    def wait(self) -> None:
        """Watch whoever holds the state, and read it anew, until nobody has claimed it in the meantime.

        Raises:
            HeldError: somebody holds it.
        """
        self._took_over = ""
        while head := self.opened.head:
            watched = watch(
                self.opened.store,
                head,
                takeover=self._request.takeover,
                command=self._command,
                tick=self._stop.tick,
                say=self._report.say,
            )
            if watched.anew:
                self.open()
            if self.before and self.before.run == head.commit.run:
                self._took_over = watched.note
                break
            if self.finished:
                break

    def begin(self, engine: str) -> None:
        """This run's row."""
        self.row = Run(
            nonce=environment.nonce(),
            claim=0,
            started=environment.utc_now(),
            engine=engine,
            machine=environment.machine_name(),
            system=environment.operating_system(),
        )

    @contextlib.contextmanager
    def claimed(self, plan: Plan) -> Iterator[bool]:
        """The state, claimed for this run and kept alive; False where whoever was quicker has finished it.

        Whoever was quicker and is alive keeps it. Else it is claimed anew, with --takeover in any case.

        Raises:
            HeldError: somebody else was quicker, or took it over within.
        """
        alive = self._claim(plan)
        if alive is None:
            yield False
            return
        try:
            with self._told_as_taken_over():
                alive.start(self.claim)
                self._keep_folder(self.opened.folder)
                yield True
        finally:
            alive.stop()

    def _claim(self, plan: Plan) -> Alive | None:
        for tries in reversed(range(CLAIM_TRIES)):
            store, head = self.opened.store, self.opened.head
            self.row = evolve(self.row, notes=(*self.notes, *([self._took_over] if self._took_over else [])))
            alive = Alive(store, head.highest + 1 if head else 1, self.row.nonce, self._stop, self.where)
            try:
                alive.announce()
                with self._stop.saving():
                    state = environment.nonce() + environment.nonce()
                    self.claim = Claim.begin(store, head, plan, self.row, state)
            except BaseException as fault:
                alive.stop()
                if not isinstance(fault, HeldError):
                    raise
            else:
                self.row = evolve(self.row, claim=self.claim.commit.number)
                return alive
            self.open()
            if not self.finished:
                self.wait()
            now = self.before
            assert now, "somebody has committed"
            refuse_differences(self.opened.place.uri, differences(now.plan, plan, without=changeable(self._request)))
            if self.finished:
                return None
            if not head or not tries:  # a plan of its own is not what somebody else has begun
                raise HeldError(f"{store.uri}: others were quicker, {now.number} commits so far; run again")
            self._report.say(f"going on from commit {now.number}, which came meanwhile")
        raise AssertionError("the last try returns or raises")

    @property
    def _command(self) -> str:
        """What resumes this build here, as far as its flags are needed for it."""
        student = self._request.flags.get("student")
        return f"spill resume {self.opened.place.again}{f' --student {shlex.quote(str(student))}' if student else ''}"

    def _keep_folder(self, folder: Folder) -> None:
        """A new state's second commit: the folder's files, so that the state alone is enough from then on."""
        if not self.claim.commit.folder:
            files = {name: folder.contents[name].decode() for name in folder.hashes()}
            with self._stop.saving():
                self.claim.write(run=self.row, folder=[to_json(files)])

    # ---- commits

    def note(self, text: str) -> None:
        self.row = evolve(self.row, notes=(*self.row.notes, text))

    def commit(self, name: str, stage: Stage, start: int) -> None:
        """Take a snapshot of a stage and commit it, with this run's share of the work from `start` on. What that
        writes, and what a kill now would lose, is said where a stop was asked for, or as soon as one is."""
        with self._stop.saving():
            snapshot = stage.snapshot()
            size = sum(memoryview(part).nbytes for parts in snapshot.objects.values() for part in parts)
            loses = self._unsaved() or "nothing"
            self._stop.saves = f"saving {self.where()}, {size / 1e6:.1f} MB; a kill now loses {loses}"
            if self._stop.asked:
                self._report.say(f"stopped by {self._stop.asked.name}: {self._stop.saves}")
            before = self.claim.commit.stages.get(name)
            record = StageRecord(
                position=stage.position,
                total=stage.total,
                finished=stage.position == stage.total,
                objects={role: before.objects[role] for role in snapshot.kept} if before else {},
                summary=dict(snapshot.summary),
            )
            self.row = evolve(self.row, work={**self.row.work, name: (start, stage.position)})
            self.claim.write(
                run=self.row,
                stages={name: record},
                new={(name, role): parts for role, parts in snapshot.objects.items()},
                probe=self.probe,
            )
        if self.claim.sweep_fault and not self._told_of_sweep:
            self._told_of_sweep = True
            self._report.warn(f"{self.claim.sweep_fault}; what older commits named is kept until it can be removed")

    # ---- what is said

    def where(self) -> str:
        """Where this run is, in words."""
        if self.working is None:
            return "its start"
        name, stage = self.working
        return f"{name} {stage.unit} {stage.position} of {stage.total}"

    def _unsaved(self) -> str:
        """What of this run no commit holds, in words; empty where there is nothing."""
        if not self.working:
            return ""
        name, stage = self.working
        record = self.claim.commit.stages.get(name)
        first, last = (record.position if record else 0) + 1, stage.position
        if last < first:
            return ""
        return f"{stage.unit} {last}" if last == first else f"{stage.unit}s {first} to {last}"

    @contextlib.contextmanager
    def _told_as_taken_over(self) -> Iterator[None]:
        """Say what is lost where somebody else took the state over. Seen from a run that does not know it yet, what
        the new holder swept away looks like damage, or like a fault of the store."""
        try:
            yield
        except (HeldError, StateError, StoreError) as fault:
            other = fault.message if isinstance(fault, HeldError) else ""
            if not other:
                with contextlib.suppress(StoreError):
                    other = stranger(self.opened.store, self.claim)
            if not other:
                raise
            raise HeldError(f"{other}; {self._discarded()}") from None

    def _discarded(self) -> str:
        unsaved = self._unsaved()
        if not unsaved:
            return f"this run was at {self.where()}, nothing of it is discarded"
        which = f"{unsaved} {'are' if ' to ' in unsaved else 'is'}"
        return f"this run was at {self.where()}; its {which} discarded, commit {self.claim.commit.number} was its last"
