"""The command line. Each command imports what it needs when it runs, so that `--help` stays quick."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

import spill
from spill.errors import InputError, SpillError

if TYPE_CHECKING:
    from spill.opening import Place
    from spill.plugins import Registry
    from spill.signals import StopRequest

Command = TypeVar("Command", bound=Callable[..., Any])


class Seconds(click.FloatRange):
    """A number of seconds from 0; not a number is none."""

    def __init__(self) -> None:
        super().__init__(0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if seconds != seconds:
            self.fail(f"{value!r} is not a number", param, ctx)
        return seconds


TARGET = click.argument("target", metavar="FOLDER|URI")
STATE = click.option("--state", metavar="URI", help="Where the state is: a path, s3://, gs://, az://.")
REFERENCE = click.option("--reference", metavar="URI", help="A state whose scores the table shows beside this one's.")
ENGINE = click.option("--engine", metavar="NAME", help="Engine to use; `spill doctor` lists them.")
STUDENT = click.option("--student", metavar="NAME", help="Tag, hf:org/name@revision, or a model directory.")
WEIGHTS = click.option("--weights", metavar="URI", default="", help="Fetch the model directory from this store.")


class Session:
    """One start of the command line: its stop request, and whether errors show their traceback."""

    def __init__(self, stop: "StopRequest") -> None:
        self.stop = stop
        self.debug = False


def run(stop: "StopRequest", arguments: Sequence[str] | None = None) -> int:
    """Run the command line (the process's own where `arguments` is None). Returns the exit code.

    Errors are one line, or a traceback with --debug.
    """
    session = Session(stop)
    try:
        result = main.main(args=arguments, standalone_mode=False, obj=session)
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "spill"
        click.echo(f"spill: {_one_line(error.format_message())}; `{where} --help` says more", err=True)
        return 2
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        return 1
    except Exception as error:
        return _explain(error, session.debug)
    return result if isinstance(result, int) else 0


def _explain(error: Exception, debug: bool) -> int:
    """Print an error as one line and its details, or as a traceback. Returns its exit code."""
    code = error.exit_code if isinstance(error, SpillError) else 1
    if debug:
        import traceback

        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
        return code
    if isinstance(error, SpillError):
        lines = [f"spill: {_one_line(error.message)}", *(f"  {_one_line(detail)}" for detail in error.details)]
    else:
        lines = [f"spill: unexpected {type(error).__name__}: {_one_line(str(error)):.300} (--debug shows where)"]
    for line in lines:
        click.echo(line, err=True)
    return code


def _one_line(text: str) -> str:
    """Names of files and models may hold line breaks and control characters; an error stays one line."""
    from spill.records import printable

    return printable(" ".join(text.split()), limit=4000)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.version_option(spill.__version__, prog_name="spill")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_obj
def main(session: Session, /, debug: bool) -> None:
    """Fine-tune a small language model from a folder; stop anywhere, finish anywhere."""
    session.debug = debug


def _build_options(command: Command) -> Command:
    for option in reversed(
        [
            TARGET,
            STATE,
            STUDENT,
            ENGINE,
            click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Compute dtype of the base."),
            click.option("--seed", type=int, help="Of the order of rows and the adapter's first values."),
            click.option("--epochs", type=int, help="Passes over the training rows."),
            click.option("--batch", type=int, help="Rows per step."),
            click.option("--learning-rate", type=float, help="Its peak."),
            click.option("--rank", type=int, help="Of the adapter."),
            click.option("--alpha", type=float, help="The adapter's scale is alpha / rank."),
            click.option("--max-length", type=int, help="Most tokens of a training row."),
            click.option("--stages", metavar="A,B,C", help="Names, in order."),
            WEIGHTS,
            click.option("--stop-after", metavar="STAGE[:N]", help="Stop after a stage, or after its step or row N."),
            click.option("--commit-every", type=Seconds(), metavar="SECONDS", help="0: after every unit."),
            click.option("--takeover", is_flag=True, help="Take the state over at once from a run that holds it."),
            click.option("--accept-drift", is_flag=True, help="Go on where a handover check finds a difference."),
            REFERENCE,
            click.option("--table", is_flag=True, help="Print the table at the end of a stopped build too."),
        ]
    ):
        command = option(command)
    return command


@main.command()
@_build_options
@click.pass_obj
def build(session: Session, /, **options: Any) -> None:
    """Start a build of FOLDER, or continue it."""
    _run_build(session.stop, resume=False, **options)


@main.command()
@_build_options
@click.pass_obj
def resume(session: Session, /, **options: Any) -> None:
    """Continue a build; refuses to start one."""
    _run_build(session.stop, resume=True, **options)


def _run_build(
    stop: "StopRequest",
    *,
    target: str,
    state: str | None,
    weights: str,
    stop_after: str | None,
    commit_every: float | None,
    accept_drift: bool,
    takeover: bool,
    reference: str | None,
    table: bool,
    resume: bool,
    stages: str | None,
    **settings: Any,
) -> None:
    from spill.opening import Request, locate
    from spill.report import make_reporter
    from spill.runner import Build
    from spill.table import finished

    flags = {key: value for key, value in settings.items() if value is not None}
    if stages:
        flags["stages"] = tuple(part.strip() for part in stages.split(","))
    if reference:
        flags["reference"] = reference
    registry = _registry()
    request = Request(
        target=target,
        state=state,
        flags=flags,
        weights=weights,
        stop_after=stop_after,
        commit_every=commit_every,
        accept_drift=accept_drift,
        takeover=takeover,
        resume=resume,
    )
    commit = Build(request, registry, stop, make_reporter()).run()
    place = locate(target, state)
    done = finished(commit)
    if done or table:
        click.echo(_table(place, commit, reference, registry))
    if done:
        click.echo(f"done; next: {_after(place, commit)}")
    else:
        at = ", ".join(f"{s} {r.position}/{r.total}" for s, r in commit.stages.items() if not r.finished)
        click.echo(f"stopped as asked{' at ' + at if at else ''}; next: spill resume {place.again}")


@main.command()
@TARGET
@STATE
@REFERENCE
def table(target: str, state: str | None, reference: str | None) -> None:
    """Show who made each stage, with scores."""
    from spill.opening import find
    from spill.table import finished

    registry = _registry()
    place, _, head = find(target, state, registry)
    for note in head.notes:
        click.echo(f"warning: {note}", err=True)
    click.echo(_table(place, head.commit, reference, registry))
    click.echo(f"next: {_after(place, head.commit) if finished(head.commit) else f'spill resume {place.again}'}")


@main.command()
@click.argument("directory", metavar="FOLDER")
def check(directory: str) -> None:
    """Tell every fault of a folder, by file and line, without touching a model."""
    from pathlib import Path

    from spill.folder import load

    folder = load(Path(directory))
    settings = folder.settings({})
    registry = _registry()
    asked = [("stage", stage) for stage in settings.stages]
    asked += [("engine", settings.engine)] if settings.engine else []
    if faults := [fault for kind, name in asked if (fault := registry.fault(kind, name))]:
        if len(faults) == 1:
            raise InputError(faults[0])
        raise InputError(f"{directory}: spill.toml names what cannot be used here", faults)
    for warning in folder.warnings:
        click.echo(f"warning: {warning}")
    click.echo(
        f"{directory}: {len(folder.training)} training rows, {len(folder.exam)} exam rows, no faults; "
        f"next: spill build {directory}"
    )


@main.command()
@click.argument("name", type=click.Choice(["relay"]))
@click.argument("directory", metavar="[FOLDER]", required=False)
@click.option("--student", default="qwen2.5:0.5b", show_default=True, help="Tag to put into spill.toml.")
def example(name: str, directory: str | None, student: str) -> None:
    """Write an example folder."""
    from pathlib import Path

    from spill.example import write_example

    folder = Path(directory or name)
    write_example(folder, student=student)
    click.echo(f"wrote {folder}: 10 intents, 20 exam rows, 100 training rows; next: {folder / 'relay.sh'}")


@main.command()
@TARGET
@click.argument("prompt", required=False)
@STATE
@STUDENT
@ENGINE
@WEIGHTS
@click.option("--base", is_flag=True, help="Ask the untrained model, with the folder's instructions.")
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="Most of an answer.")
@click.pass_obj
def ask(session: Session, /, prompt: str | None, **options: Any) -> None:
    """Ask the tuned model: one PROMPT, or one after another."""
    from spill.use import open_answers

    with open_answers(registry=_registry(), stop=session.stop, **options) as answer:
        if prompt is not None:
            click.echo(answer(prompt))
            return
        session.stop.leave_at_once()
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                return
            if line.strip():
                click.echo(answer(line))


@main.command()
@TARGET
@STATE
@STUDENT
@WEIGHTS
@click.option("--out", required=True, metavar="DIR", help="A new folder.")
@click.option("--layout", type=click.Choice(["peft", "mlx"]), default="peft", show_default=True, help="The adapter's.")
@click.option("--merged", is_flag=True, help="The whole model, with the adapter merged in.")
@click.pass_obj
def export(session: Session, /, **options: Any) -> None:
    """Write the tuned adapter, or the whole tuned model."""
    from spill import use

    _print(use.export(registry=_registry(), stop=session.stop, **options))


@main.command()
@click.option("--names", is_flag=True, help="Only the available engines' names, the best first.")
def doctor(names: bool) -> None:
    """List engines with reasons and measured rates."""
    from spill.doctor import available, report

    registry = _registry()
    _print(available(registry) if names else report(registry))


@main.command()
def plugins() -> None:
    """List plugins, what each brings, and the whole cause where one is broken."""
    from spill.plugins import discover

    registry = discover()
    for plugin in registry.plugins:
        click.echo(f"{plugin.name} ({plugin.label})")
        for found in registry.found:
            if found.plugin is plugin:
                note = "" if found.usable else f"  NOT USABLE: {found.mismatch()}"
                click.echo(f"  {found.kind:6} {found.spec.name:12} {found.spec.summary}{note}")
        if plugin.cause:
            click.echo(f"  BROKEN: {plugin.cause}")
            for line in plugin.trace.rstrip().splitlines():
                click.echo(f"    {line}")
    for kind in ("engine", "store", "stage"):
        for name, claimants in registry.named(kind).items():
            if len(claimants) > 1:
                click.echo(f"CLASH: {kind} {name!r} of {', '.join(f.plugin.label for f in claimants)}")


@main.group()
def state() -> None:
    """Look after a state: verify, history, copy, gc."""


@state.command()
@TARGET
@STATE
def verify(target: str, state: str | None) -> None:
    """Check every object of the newest commits."""
    from spill import upkeep

    _print(upkeep.verify(target, state, _registry()))


@state.command()
@TARGET
@STATE
def history(target: str, state: str | None) -> None:
    """Tell who did what: runs, hops, takeovers."""
    from spill import upkeep

    _print(upkeep.history(target, state, _registry()))


@state.command()
@click.argument("source", metavar="FOLDER|URI")
@click.argument("destination", metavar="URI")
@click.pass_obj
def copy(session: Session, source: str, destination: str) -> None:
    """Copy a state to another place, on any store."""
    from spill import upkeep

    _print(upkeep.copy(source, destination, _registry(), session.stop.tick))


@state.command()
@TARGET
@STATE
@click.option("--takeover", is_flag=True, help="Take the state over at once from a run that holds it.")
@click.pass_obj
def gc(session: Session, target: str, state: str | None, takeover: bool) -> None:
    """Free what no kept commit names; claims the state first."""
    from spill import upkeep

    _print(upkeep.collect(target, state, takeover, _registry(), session.stop.tick, click.echo))


def _after(place: "Place", commit: Any) -> str:
    """What to do with a finished build."""
    if "tune" not in commit.stages:
        return f'spill ask {place.again} --base "..."'
    return f'spill ask {place.again} "..."   or   spill export {place.again} --out DIR'


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)


def _registry() -> "Registry":
    """Discover plugins, with a line on standard error for each that is left out."""
    from spill.plugins import discover

    registry = discover()
    for line in registry.warnings():
        click.echo(f"spill: {line}", err=True)
    return registry


def _table(place: "Place", commit: Any, reference: str | None, registry: "Registry") -> str:
    from spill.state import newest
    from spill.stores import open_store
    from spill.table import render

    if reference is None and place.directory:
        from spill.folder import load

        reference = load(place.directory).settings({}).reference
    other = newest(open_store(reference, registry)) if reference else None
    if reference and other is None:
        click.echo(f"warning: the reference {reference} holds no state yet", err=True)
    return render(commit, other.commit if other else None)
