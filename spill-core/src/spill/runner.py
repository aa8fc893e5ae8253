"""A build from start to end: what is asked meets what the state holds, the run claims, stages advance and commit."""

import contextlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

from attrs import evolve

from spill import environment, models, rates
from spill.alive import Alive, refuse_slower, watch
from spill.claim import Claim, stranger
from spill.engine import AdapterSpec, Engine, Numerics
from spill.errors import HeldError, PluginError, SpillError, StateError, Stopped, StoreError
from spill.folder import Folder, Settings, settings_flags
from spill.handover import check_drift, fits, probe_rows, rounded_losses
from spill.opening import (
    Opened,
    Place,
    Request,
    changeable,
    model_line,
    open_build,
    parse_stop_after,
    pinned,
    refuse_local,
    saved_stage,
)
from spill.plan import Student, differences, make_plan, prepare, refuse_differences
from spill.plugins import EngineSpec, Registry, detect, load_target
from spill.records import Commit, Probe, Run, StageRecord, printable, to_json
from spill.signals import StopRequest
from spill.stages import Progress, Saved, Stage, Work
from spill.table import finished, who

COMMIT_SECONDS = 60.0
LONG_UNIT_SECONDS = 5.0
COST_SHARE = 0.05
TAKEOVER_TRIES = 20


class Reporter(Protocol):
    """Where a build tells the user what happens."""

    def say(self, line: str) -> None: ...

    def warn(self, line: str) -> None: ...

    def begin(self, stage: str, unit: str, position: int, total: int) -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def end(self) -> None: ...


class Build:
    """One run: everything between reading the state and the last commit."""

    def __init__(self, request: Request, registry: Registry, stop: StopRequest, report: Reporter) -> None:
        self._request = request
        self._registry = registry
        self._stop = stop
        self._report = report
        self._engine: Engine | None = None
        self._base_checked = False
        self._notes: list[str] = []
        self._probe: Probe | None = None
        self._working: tuple[str, Stage] | None = None
        self._told_of_sweep = False
        self._before: Commit | None = None
        self._run_row: Run

    def run(self) -> Commit:
        """Build until done or stopped. Returns the last commit.

        Raises:
            Stopped: a signal came; what was done is saved.
            SpillError: anything that stands in the way; the last commit stands.
        """
        opened = self._open_build()
        if opened.head and finished(opened.head.commit):
            with contextlib.suppress(Stopped):  # there is nothing left to stop
                self._check_model_at_hand(opened.head.commit)
            return opened.head.commit
        stages = opened.head.commit.plan.stages if opened.head else opened.settings.stages
        for stage in stages:
            self._registry.get("stage", stage)
        stop_stage, stop_position = parse_stop_after(self._request.stop_after, stages)
        opened = self._wait_for_holder(opened)
        if opened.head and finished(opened.head.commit):
            return opened.head.commit
        self._prepare(opened)
        self._introduce(opened)
        self._stop.tick()
        if self._before and self._before.plan.dtype != self._plan.dtype:
            self._load_engine()  # one that refuses the new dtype must do so before the plan is changed
        try:
            alive = self._claim_state(opened)
            if isinstance(alive, Commit):
                return alive
            try:
                with self._told_as_taken_over():
                    alive.start(self._claim)
                    self._keep_folder(opened.folder)
                    for stage in self._plan.stages:
                        limit = stop_position if stage == stop_stage else None
                        self._run_stage(stage, limit)
                        if stage == stop_stage:
                            break
            finally:
                alive.stop()
        finally:
            self._close_engine()
        return self._claim.commit

    def _wait_for_holder(self, opened: Opened) -> Opened:
        """Watch whoever holds the state, and read it anew, until nobody has claimed it in the meantime."""
        while head := opened.head:
            watched = watch(
                opened.store,
                head,
                takeover=self._request.takeover,
                command=self._command(opened),
                tick=self._stop.tick,
                say=self._report.say,
            )
            if watched.note:
                self._notes.append(watched.note)
            if not watched.anew:
                break
            opened = self._open_build()
            if opened.head and (finished(opened.head.commit) or opened.head.commit.run == head.commit.run):
                break
        return opened

    def _claim_state(self, opened: Opened) -> Alive | Commit:
        """Claim the state, with this run announced as alive; or its last commit, where whoever was quicker finished it.

        With --takeover a holder that commits meanwhile is claimed over all the same.
        """
        for tries in reversed(range(TAKEOVER_TRIES)):
            number = opened.head.highest + 1 if opened.head else 1
            alive = Alive(opened.store, number, self._run_row.nonce, self._stop, self._where)
            try:
                alive.announce()
                with self._stop.saving():
                    state = environment.nonce() + environment.nonce()
                    self._claim = Claim.begin(opened.store, opened.head, self._plan, self._run_row, state)
            except BaseException as fault:
                alive.stop()
                if not isinstance(fault, HeldError):
                    raise
            else:
                self._run_row = evolve(self._run_row, claim=self._claim.commit.number)
                return alive
            opened = self._open_build()
            assert opened.head, "somebody has committed"
            differ = differences(opened.head.commit.plan, self._plan, without=changeable(self._request))
            refuse_differences(opened.place.uri, differ)
            if finished(opened.head.commit):
                return opened.head.commit
            if not (self._request.takeover and self._before and tries):
                raise refuse_slower(opened.store, opened.head, self._command(opened))
            self._before = opened.head.commit
        raise AssertionError("the last try returns or raises")

    def _command(self, opened: Opened) -> str:
        """What resumes this build here, as far as its flags are needed for it."""
        student = self._request.flags.get("student")
        return f"spill resume {opened.place.again}{f' --student {shlex.quote(str(student))}' if student else ''}"

    @contextlib.contextmanager
    def _told_as_taken_over(self) -> Iterator[None]:
        """Say what is lost where somebody else took the state over. Seen from a run that does not know it yet, what
        the new holder swept away looks like damage."""
        try:
            yield
        except (HeldError, StateError, StoreError) as fault:
            other = fault.message if isinstance(fault, HeldError) else ""
            if not other:
                with contextlib.suppress(StoreError):
                    other = stranger(self._opened.store, self._claim)
            if not other:
                raise
            raise HeldError(f"{other}; {self._discarded()}") from None

    def _where(self) -> str:
        if self._working is None:
            return "its start"
        name, stage = self._working
        return f"{name} {stage.unit} {stage.position} of {stage.total}"

    def _unsaved(self) -> str:
        """What of this run no commit holds, in words; empty where there is nothing."""
        if not self._working:
            return ""
        name, stage = self._working
        record = self._claim.commit.stages.get(name)
        first, last = (record.position if record else 0) + 1, stage.position
        if last < first:
            return ""
        return f"{stage.unit} {last}" if last == first else f"{stage.unit}s {first} to {last}"

    def _discarded(self) -> str:
        """Where this run is, and what of it no commit holds."""
        unsaved = self._unsaved()
        if not unsaved:
            return f"this run was at {self._where()}, nothing of it is discarded"
        which = f"{unsaved} {'are' if ' to ' in unsaved else 'is'}"
        return (
            f"this run was at {self._where()}; its {which} discarded, commit {self._claim.commit.number} was its last"
        )

    def _open_build(self) -> Opened:
        self._opened = open_build(self._request, self._registry)
        head = self._opened.head
        for line in (*self._opened.folder.warnings, *(head.notes if head else ())):
            self._report.warn(line)
        return self._opened

    def _check_model_at_hand(self, commit: Commit) -> None:
        """A finished build is not reused for another model, where this machine can tell without fetching one."""
        student = self._opened.settings.student
        if self._opened.place.directory is None and "student" not in self._request.flags:
            return
        if student == "local" or not (model := self._resolve(student, offline=True)):
            return
        if model.identity != commit.plan.model:
            refuse_differences(self._opened.place.uri, [model_line(commit.plan, model)])

    def _resolve(self, student: str, offline: bool = False) -> models.Model | None:
        return models.resolve(
            student, weights=self._request.weights, tick=self._stop.tick, say=self._report.say, offline=offline
        )

    def _find_model(self, opened: Opened) -> models.Model:
        student = opened.settings.student
        if "student" not in self._request.flags and opened.head:
            if opened.place.directory is None:
                self._report.say(f"the state names its student: {printable(student)}")
                refuse_local(student)
            student = pinned(student, opened.head.commit, lambda name: self._resolve(name, offline=True))
        model = self._resolve(student)
        assert model is not None
        return model

    def _prepare(self, opened: Opened) -> None:
        """Model, tokens, engine and plan: all that must be right before the state is claimed."""
        settings = opened.settings
        self._spec, self._why, default_dtype = self._choose_engine(settings)
        model = self._find_model(opened)
        before_commit = opened.head.commit if opened.head else None
        before = before_commit.plan if before_commit else None
        if before and model.identity != before.model:
            refuse_differences(opened.place.uri, [model_line(before, model)])
        self._student: Student = prepare(model, models.stop_ids(model), opened.folder, settings)
        dtype: Any = settings.dtype or (before.dtype if before else default_dtype)
        flags = settings_flags(self._request.flags)
        if "student" in self._request.flags and model.student != "local":
            flags["student"] = model.student
        if before:  # a dtype that was changed by flag is the build's own from now on
            flags = {**before.flags, **{name: flags[name] for name in changeable(self._request)}}
        known_as = before.student if before else model.student
        plan = make_plan(opened.folder, settings, self._student, dtype, self._registry, flags, known_as, before)
        if before:
            refuse_differences(opened.place.uri, differences(before, plan, without=changeable(self._request)))
            if plan.dtype != before.dtype:
                self._notes.append(f"dtype {before.dtype} -> {plan.dtype}")
        self._plan = plan
        self._before = before_commit
        self._run_row = Run(
            nonce=environment.nonce(),
            claim=0,
            started=environment.utc_now(),
            engine=self._spec.name,
            machine=environment.machine_name(),
            system=environment.operating_system(),
            notes=tuple(self._notes),
        )

    def _choose_engine(self, settings: Settings) -> tuple[EngineSpec, str, Literal["float32", "bfloat16"]]:
        if settings.engine:
            spec = self._registry.engine(settings.engine)
            return spec, "asked for", detect(spec).dtype
        spec, seen = self._registry.choose_engine()
        return spec, seen.reason, seen.dtype

    def _introduce(self, opened: Opened) -> None:
        plan, head = self._plan, opened.head
        left = [s for s in plan.stages if not (head and s in head.commit.stages and head.commit.stages[s].finished)]
        steps = -(-len(self._student.rows) // plan.batch) * plan.epochs
        tokens = sum(len(r.tokens) for r in self._student.rows) * plan.epochs
        done = {s: r.position for s, r in head.commit.stages.items()} if head else {}
        units = {self._rate_key(s): (steps if s == "tune" else len(opened.folder.exam)) - done.get(s, 0) for s in left}
        seconds = rates.estimate(units)
        about = f"about {rates.duration(seconds)}" if seconds is not None else "no estimate, it is the first one here"
        self._report.say(
            f"{self._student.model.student} ({self._student.model.parameters / 1e6:.0f}M) on {self._spec.name} "
            f"({self._why}), {plan.dtype}: {', '.join(left)}; {len(opened.folder.exam)} exam rows, {steps} steps of "
            f"{plan.batch} rows, {tokens:,} training tokens, peak learning rate {plan.learning_rate:g}; {about}"
        )
        if head:
            last = next((r for r in head.commit.runs if r.nonce == head.commit.run), None)
            at = [f"{s} {r.position}/{r.total}" for s, r in head.commit.stages.items() if not r.finished]
            self._report.say(
                f"resuming from commit {head.commit.number} of {who(last) if last else 'an unknown run'}"
                f"{' at ' + ', '.join(at) if at else ''}; only what came after that commit, if anything, is done again"
            )

    def _keep_folder(self, folder: Folder) -> None:
        """A new state's second commit: the folder's files, so that the state alone is enough from then on."""
        if not self._claim.commit.folder:
            files = {name: folder.contents[name].decode() for name in folder.hashes()}
            with self._stop.saving():
                self._claim.write(run=self._run_row, folder=[to_json(files)])

    # ---- stages

    def _run_stage(self, name: str, limit: int | None) -> None:
        record = self._claim.commit.stages.get(name)
        stage: Stage = load_target(self._registry.get("stage", name).spec)(self._work(name))
        if record and record.total != stage.total:
            raise StateError(f"the state has {name} with {record.total} {stage.unit}s, this build has {stage.total}")
        if record and record.finished:
            return
        end = stage.total if limit is None else min(limit, stage.total)
        if stage.position >= end and record:
            self._report.say(f"{name} is at {stage.unit} {stage.position} of {stage.total} already")
            return
        start = stage.position
        committer = _Committer(self, name, stage, start)
        self._report.begin(name, stage.unit, start, stage.total)
        self._working = (name, stage)
        try:
            for progress in stage.advance(end):
                self._report.progress(progress)
                committer.after_unit()
                if progress.position < end:
                    self._stop.tick()
        except Stopped as stopped:
            self._report.end()
            raise self._save_and_stop(stopped, committer) from None
        self._report.end()
        committer.commit(final=True)
        if seconds := committer.unit_seconds:
            rates.remember(self._rate_key(name), seconds)

    def _rate_key(self, stage: str) -> str:
        return rates.key(self._spec.name, self._plan.dtype, self._plan.model, stage)

    def _save_and_stop(self, stopped: Stopped, committer: "_Committer") -> Stopped:
        committer.commit()
        return Stopped(
            f"{stopped.message} at {self._where()}; saved: commit {self._claim.commit.number}", stopped.exit_code
        )

    def _work(self, name: str) -> Work:
        commit = self._claim.commit
        return Work(
            name=name,
            plan=self._plan,
            folder=self._opened.folder,
            text=self._student.text,
            rows=self._student.rows,
            adapter=self._student.adapter,
            engine=self._open_engine,
            saved=self._saved(commit, name),
            others={other: s for other in commit.stages if other != name and (s := self._saved(commit, other))},
            taken_over=lambda: self._taken_over(name),
            accept_drift=self._request.accept_drift,
            note=self._note,
            say=self._report.say,
        )

    def _saved(self, commit: Commit, name: str) -> Saved | None:
        record = commit.stages.get(name)
        if record is None:
            return None
        return saved_stage(self._opened.store, commit, record)

    # ---- the engine

    def _open_engine(self) -> Engine:
        """The engine of this run, opened once; its base model is checked against the one before where it is another."""
        engine = self._engine or self._load_engine()
        if not self._base_checked:
            self._check_base(engine)
            self._base_checked = True
        return engine

    def _load_engine(self) -> Engine:
        runs = self._before.runs if self._before else ()
        earlier = [r.numerics for r in runs if r.engine == self._spec.name and r.numerics]
        asked = Numerics(dtype=self._plan.dtype)
        if earlier and earlier[-1].dtype == self._plan.dtype:
            asked = earlier[-1]
        model = self._student.model
        engine = open_engine(self._spec, model.directory, self._student.adapter, asked, self._stop.tick)
        self._engine = engine
        facts = engine.facts()
        for note in facts.notes:
            self._report.say(f"{self._spec.name}: {note}")
        versions = {**facts.versions, **({"model": model.revision} if model.revision else {})}
        self._run_row = evolve(self._run_row, hardware=facts.hardware, numerics=facts.numerics, versions=versions)
        return engine

    def _close_engine(self) -> None:
        if self._engine:
            self._engine.close()

    def _check_base(self, engine: Engine) -> None:
        probe = self._claim.commit.probe
        rows = tuple(probe_rows(self._student.rows))
        of_rows = [self._student.rows[i] for i in rows]
        if probe is None:
            losses = rounded_losses(engine.nll(of_rows, adapter=False))
            self._probe = Probe(rows=rows, losses=tuple(tuple(x) for x in losses))
            return
        if not fits(probe.losses, of_rows) or probe.rows != rows:
            raise StateError("the state's probe of the base model does not fit the folder's training rows")
        runs = self._before.runs if self._before else ()
        if any(r.engine == self._spec.name and r.hardware == self._run_row.hardware for r in runs):
            return
        before = next((who(r) for r in runs if r.hardware), "an earlier run")
        check_drift(
            "the base model",
            before,
            probe.losses,
            engine.nll(of_rows, adapter=False),
            accept=self._request.accept_drift,
            note=self._note,
            say=self._report.say,
        )

    def _taken_over(self, name: str) -> str:
        self._open_engine()
        workers = [r for r in (self._before.runs if self._before else ()) if name in r.work]
        if not workers:
            return ""
        last = workers[-1]
        same = last.engine == self._spec.name and last.hardware == self._run_row.hardware
        return "" if same else who(last)

    def _note(self, text: str) -> None:
        self._run_row = evolve(self._run_row, notes=(*self._run_row.notes, text))

    def commit_stage(self, name: str, stage: Stage, start: int) -> None:
        """Take a snapshot of a stage and commit it, with this run's share of the work. What that writes, and what a
        kill now would lose, is said where a stop was asked for, or as soon as one is."""
        with self._stop.saving():
            snapshot = stage.snapshot()
            size = sum(memoryview(part).nbytes for parts in snapshot.objects.values() for part in parts)
            self._stop.saves = (
                f"saving {self._where()}, {size / 1e6:.1f} MB; a kill now loses {self._unsaved() or 'nothing'}"
            )
            if self._stop.asked:
                self._report.say(f"stopped by {self._stop.asked.name}: {self._stop.saves}")
            before = self._claim.commit.stages.get(name)
            kept = {role: before.objects[role] for role in snapshot.kept} if before else {}
            record = StageRecord(
                position=stage.position,
                total=stage.total,
                finished=stage.position == stage.total,
                objects=kept,
                summary=dict(snapshot.summary),
            )
            self._run_row = evolve(self._run_row, work={**self._run_row.work, name: (start, stage.position)})
            self._claim.write(
                run=self._run_row,
                stages={name: record},
                new={(name, role): parts for role, parts in snapshot.objects.items()},
                probe=self._probe,
            )
        if self._claim.sweep_fault and not self._told_of_sweep:
            self._told_of_sweep = True
            self._report.warn(f"{self._claim.sweep_fault}; what older commits named is kept until it can be removed")

    @property
    def place(self) -> Place:
        return self._opened.place

    @property
    def commit_every(self) -> float | None:
        return self._request.commit_every


class _Committer:
    """When to commit: every 60 s, or after every unit that took over 5 s, but never at more than 5 % of the time."""

    def __init__(self, build: Build, name: str, stage: Stage, start: int) -> None:
        self._build = build
        self._name = name
        self._stage = stage
        self._start = start
        self._committed = start
        self._begun = self._last_commit = self._last_unit = environment.seconds()
        self._cost = 0.0

    @property
    def unit_seconds(self) -> float | None:
        """Seconds a unit took, with commits and what was loaded for the first one; None where none was made."""
        made = self._stage.position - self._start
        return (self._last_commit - self._begun) / made if made > 0 else None

    @property
    def unsaved(self) -> int:
        return self._stage.position - self._committed

    def after_unit(self) -> None:
        now = environment.seconds()
        unit, since = now - self._last_unit, now - self._last_commit
        self._last_unit = now
        every = self._build.commit_every
        if every is not None:
            due = since >= every
        else:
            due = since >= self._cost / COST_SHARE and (since >= COMMIT_SECONDS or unit > LONG_UNIT_SECONDS)
        if due and self._stage.position < self._stage.total:
            self.commit()

    def commit(self, final: bool = False) -> None:
        if not self.unsaved and not final:
            return
        begun = environment.seconds()
        self._build.commit_stage(self._name, self._stage, self._start)
        self._committed = self._stage.position
        self._last_commit = self._last_unit = environment.seconds()
        self._cost = self._last_commit - begun


def open_engine(
    spec: EngineSpec, model_dir: Path, adapter: AdapterSpec, numerics: Numerics, tick: Callable[[], None]
) -> Engine:
    """Open the chosen engine; that it fails is an error, never a reason to take another.

    Raises:
        PluginError: it cannot be imported or opened.
    """
    seen = detect(spec)
    hint = "" if seen.available else f" ({seen.reason})"
    try:
        target = load_target(spec)
    except PluginError as error:
        raise PluginError(f"{error.message}{hint}") from error
    try:
        engine: Engine = target(model_dir=model_dir, adapter=adapter, numerics=numerics, tick=tick)
    except SpillError:
        raise
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        raise PluginError(
            f"engine {spec.name!r} failed to open {model_dir.name}: {type(error).__name__}: {text:.300}{hint}"
        ) from error
    return engine
