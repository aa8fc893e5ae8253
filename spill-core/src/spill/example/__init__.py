"""The relay example: a folder to build, as package data beside this module, and the function that writes it out."""

import json
from importlib import resources
from pathlib import Path

from spill.errors import InputError

FILES = ("README.md", "evals.jsonl", "instructions.txt", "relay.sh", "spill.toml", "train.jsonl")
STUDENT = "qwen2.5:0.5b"


def write_example(directory: Path, *, student: str = STUDENT) -> list[Path]:
    """Write the example into `directory`, which is made where it is missing, and return the paths written.

    `student` is a tag or hub id and becomes the `student` of spill.toml. relay.sh is made executable for everybody
    who may read it.

    Raises:
        InputError: the directory is a file or holds something, it cannot be written, or `student` is not one line
            of printable text.
    """
    if not student.strip() or not student.isprintable():
        raise InputError(f"student {student!r} is not a model's name: give a tag such as {STUDENT}, or a hub id")
    try:
        if directory.exists() and not directory.is_dir():
            raise InputError(f"the example cannot go to {directory}: that is a file; name a new directory")
        directory.mkdir(parents=True, exist_ok=True)
        found = next(directory.iterdir(), None)
        if found:
            raise InputError(
                f"the example needs an empty directory, and {directory} holds {found.name!r}; name a new one"
            )
        return [_write(directory / name, student) for name in FILES]
    except OSError as error:
        raise InputError(
            f"the example cannot be written to {directory}: {error.strerror}; name a directory that you may write to"
        ) from error


def _write(path: Path, student: str) -> Path:
    content = (resources.files(__name__) / path.name).read_bytes()
    if path.name == "spill.toml":
        # A JSON string of printable characters is a TOML string too.
        content = content.replace(b'"@student@"', json.dumps(student, ensure_ascii=False).encode())
    path.write_bytes(content)
    if path.suffix == ".sh":
        mode = path.stat().st_mode
        path.chmod(mode | (mode & 0o444) >> 2)
    return path
