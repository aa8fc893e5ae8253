"""A build from start to end: what is asked meets what the state holds, the run claims, stages advance and commit."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from attrs import evolve

from spill import environment, models, rates
from spill.engine import AdapterSpec, Engine, Numerics
from spill.errors import PluginError, SpillError, StateError, Stopped
from spill.folder import Settings, settings_flags
from spill.handover import check_drift, fits, probe_rows, rounded_losses
from spill.holding import Hold
from spill.opening import (
    Opened,
    Request,
    changeable,
    model_line,
    parse_stop_after,
    pinned,
    refuse_local,
    saved_stage,
)
from spill.plan import Student, differences, make_plan, prepare, refuse_differences
from spill.plugins import EngineSpec, Registry, detect, load_target
from spill.records import Commit, Probe, printable
from spill.signals import StopRequest
from spill.stages import Reporter, Saved, Stage, Work
from spill.table import who

COMMIT_SECONDS = 60.0
LONG_UNIT_SECONDS = 5.0
COST_SHARE = 0.05


class Build:
    """One run: everything between reading the state and the last commit."""

    def __init__(self, request: Request, registry: Registry, stop: StopRequest, report: Reporter) -> None:
        self._request = request
        self._registry = registry
        self._stop = stop
        self._report = report
        self._hold: Hold
        self._engine: Engine | None = None
        self._base_checked = False

    def run(self) -> Commit:
        """Build until done or stopped. Returns the last commit.

        Raises:
            Stopped: a signal came; what was done is saved.
            SpillError: anything that stands in the way; the last commit stands.
        """
        hold = self._hold = Hold(self._request, self._registry, self._stop, self._report)
        if hold.finished:
            with contextlib.suppress(Stopped):  # there is nothing left to stop
                self._check_model_at_hand(hold.finished)
            return hold.finished
        stages = hold.before.plan.stages if hold.before else hold.opened.settings.stages
        for stage in stages:
            self._registry.get("stage", stage)
        stop_stage, stop_position = parse_stop_after(self._request.stop_after, stages)
        hold.wait()
        if hold.finished:
            return hold.finished
        self._prepare(hold.opened)
        self._introduce(hold.opened)
        self._stop.tick()
        if hold.before and hold.before.plan.dtype != self._plan.dtype:
            self._load_engine()  # one that refuses the new dtype must do so before the plan is changed
        try:
            with hold.claimed(self._plan) as is_mine:
                if not is_mine:
                    assert hold.finished
                    return hold.finished
                for stage in self._plan.stages:
                    limit = stop_position if stage == stop_stage else None
                    self._run_stage(stage, limit)
                    if stage == stop_stage:
                        break
        finally:
            self._close_engine()
        return hold.claim.commit

    def _check_model_at_hand(self, commit: Commit) -> None:
        """A finished build is not reused for another model, where this machine can tell without fetching one."""
        student = self._hold.opened.settings.student
        if self._hold.opened.place.directory is None and "student" not in self._request.flags:
            return
        if student == "local" or not (model := self._resolve(student, offline=True)):
            return
        if model.identity != commit.plan.model:
            refuse_differences(self._hold.opened.place.uri, [model_line(commit.plan, model)])

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
        self._student: Student = prepare(model, models.stop_ids(model), opened.folder, settings, self._stop.tick)
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
                self._hold.notes.append(f"dtype {before.dtype} -> {plan.dtype}")
        self._plan = plan
        self._hold.begin(self._spec.name)

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

    # ---- stages

    def _run_stage(self, name: str, limit: int | None) -> None:
        record = self._hold.claim.commit.stages.get(name)
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
        committer = _Committer(self._hold, name, stage, self._request.commit_every)
        self._report.begin(name, stage.unit, start, stage.total)
        self._hold.working = (name, stage)
        try:
            for progress in stage.advance(end):
                self._report.progress(progress)
                committer.after_unit()
                if progress.position < end:
                    self._stop.tick()
        except Stopped as stopped:
            self._report.end()
            committer.commit()
            number = self._hold.claim.commit.number
            saved = f"{stopped.message} at {self._hold.where()}; saved: commit {number}"
            raise Stopped(saved, stopped.exit_code) from None
        self._report.end()
        committer.commit(final=True)
        if seconds := committer.unit_seconds:
            rates.remember(self._rate_key(name), seconds)

    def _rate_key(self, stage: str) -> str:
        return rates.key(self._spec.name, self._plan.dtype, self._plan.model, stage)

    def _work(self, name: str) -> Work:
        commit = self._hold.claim.commit
        return Work(
            name=name,
            plan=self._plan,
            folder=self._hold.opened.folder,
            text=self._student.text,
            rows=self._student.rows,
            adapter=self._student.adapter,
            engine=self._open_engine,
            saved=self._saved(commit, name),
            others={other: s for other in commit.stages if other != name and (s := self._saved(commit, other))},
            taken_over=lambda: self._taken_over(name),
            accept_drift=self._request.accept_drift,
            note=self._hold.note,
            say=self._report.say,
        )

    def _saved(self, commit: Commit, name: str) -> Saved | None:
        record = commit.stages.get(name)
        if record is None:
            return None
        return saved_stage(self._hold.opened.store, commit, record)

    # ---- the engine

    def _open_engine(self) -> Engine:
        """The engine of this run, opened once; its base model is checked against the one before where it is another."""
        engine = self._engine or self._load_engine()
        if not self._base_checked:
            self._check_base(engine)
            self._base_checked = True
        return engine

    def _load_engine(self) -> Engine:
        runs = self._hold.before.runs if self._hold.before else ()
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
        self._hold.row = evolve(self._hold.row, hardware=facts.hardware, numerics=facts.numerics, versions=versions)
        return engine

    def _close_engine(self) -> None:
        if self._engine:
            self._engine.close()

    def _check_base(self, engine: Engine) -> None:
        probe = self._hold.claim.commit.probe
        rows = tuple(probe_rows(self._student.rows))
        of_rows = [self._student.rows[i] for i in rows]
        if probe is None:
            losses = rounded_losses(engine.nll(of_rows, adapter=False))
            self._hold.probe = Probe(rows=rows, losses=tuple(tuple(x) for x in losses))
            return
        if not fits(probe.losses, of_rows) or probe.rows != rows:
            raise StateError("the state's probe of the base model does not fit the folder's training rows")
        runs = self._hold.before.runs if self._hold.before else ()
        if any(r.engine == self._spec.name and r.hardware == self._hold.row.hardware for r in runs):
            return
        before = next((who(r) for r in runs if r.hardware), "an earlier run")
        check_drift(
            "the base model",
            before,
            probe.losses,
            engine.nll(of_rows, adapter=False),
            accept=self._request.accept_drift,
            note=self._hold.note,
            say=self._report.say,
        )

    def _taken_over(self, name: str) -> str:
        self._open_engine()
        workers = [r for r in (self._hold.before.runs if self._hold.before else ()) if name in r.work]
        if not workers:
            return ""
        last = workers[-1]
        same = last.engine == self._spec.name and last.hardware == self._hold.row.hardware
        return "" if same else who(last)


class _Committer:
    """When to commit: every 60 s, or after every unit that took over 5 s, but never at more than 5 % of the time."""

    def __init__(self, hold: Hold, name: str, stage: Stage, every: float | None) -> None:
        self._hold = hold
        self._name = name
        self._stage = stage
        self._every = every
        self._start = self._committed = stage.position
        self._begun = self._last_commit = self._last_unit = environment.seconds()
        self._cost = 0.0

    @property
    def unit_seconds(self) -> float | None:
        """Seconds a unit took, with commits and what was loaded for the first one; None where none was made."""
        made = self._stage.position - self._start
        return (self._last_commit - self._begun) / made if made > 0 else None

    def after_unit(self) -> None:
        now = environment.seconds()
        unit, since = now - self._last_unit, now - self._last_commit
        self._last_unit = now
        if self._every is not None:
            due = since >= self._every
        else:
            due = since >= self._cost / COST_SHARE and (since >= COMMIT_SECONDS or unit > LONG_UNIT_SECONDS)
        if due and self._stage.position < self._stage.total:
            self.commit()

    def commit(self, final: bool = False) -> None:
        if self._stage.position == self._committed and not final:
            return
        begun = environment.seconds()
        self._hold.commit(self._name, self._stage, self._start)
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
