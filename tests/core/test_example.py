"""The relay example: its rows, its settings, and relay.sh against a stand-in for the command line."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
import tomllib
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from attrs import fields

from spill.errors import InputError
from spill.example import FILES, STUDENT, write_example
from spill.folder import Settings, load, make_settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_example(tmp_path / "relay")
    return tmp_path / "relay"


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


def tokens(prompt: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9']+", prompt.casefold()))


# The rows


def test_exam_and_training_are_balanced_over_ten_labels(folder: Path) -> None:
    train, exam = rows(folder, "train.jsonl"), rows(folder, "evals.jsonl")
    assert all(row.keys() == {"prompt", "answer"} for row in train)
    assert all(row.keys() == {"prompt", "expected"} for row in exam)
    answers, expected = Counter(r["answer"] for r in train), Counter(r["expected"] for r in exam)
    assert len(answers) == 10
    assert answers == dict.fromkeys(answers, 10)
    assert expected == dict.fromkeys(answers, 2)


def test_the_order_is_mixed(folder: Path) -> None:
    for name, key in (("train.jsonl", "answer"), ("evals.jsonl", "expected")):
        labels = [row[key] for row in rows(folder, name)]
        assert all(a != b for a, b in pairwise(labels))
        blocks = [tuple(labels[i : i + 10]) for i in range(0, len(labels), 10)]
        assert all(len(set(block)) == 10 for block in blocks)
        assert len(set(blocks)) == len(blocks)


def test_no_row_stands_twice_or_almost_twice(folder: Path) -> None:
    prompts = [row["prompt"] for name in ("train.jsonl", "evals.jsonl") for row in rows(folder, name)]
    assert len({" ".join(p.casefold().split()) for p in prompts}) == 120
    for one, other in combinations(prompts, 2):
        shared = len(tokens(one) & tokens(other)) / min(len(tokens(one)), len(tokens(other)))
        assert shared <= 0.8, (one, other)


def test_prompts_are_sentences_of_6_to_20_words(folder: Path) -> None:
    for row in rows(folder, "train.jsonl") + rows(folder, "evals.jsonl"):
        assert 6 <= len(row["prompt"].split()) <= 20, row
        assert row["prompt"][-1] in ".?", row


def test_instructions_list_exactly_the_labels(folder: Path) -> None:
    labels = {row["answer"] for row in rows(folder, "train.jsonl")}
    lines = (folder / "instructions.txt").read_text(encoding="utf-8").splitlines()
    assert sorted(line for line in lines if re.fullmatch(r"[a-z_]+", line)) == sorted(labels)


# Writing


def test_the_folder_is_one_that_spill_reads_without_a_fault(folder: Path) -> None:
    read = load(folder)
    assert (len(read.training), len(read.exam), read.warnings) == (100, 20, ())
    assert read.settings({}) == Settings(student=STUDENT) == Settings()


def test_settings_hold_the_student_and_document_every_key(folder: Path) -> None:
    text = (folder / "spill.toml").read_text(encoding="utf-8")
    assert tomllib.loads(text) == {"student": "qwen2.5:0.5b"}
    shown = tomllib.loads(re.sub(r"(?m)^# (?=[a-z_]+ = )", "", text))
    assert list(shown) == [field.name for field in fields(Settings)]
    read, default = make_settings(shown), Settings()
    for name in ("seed", "epochs", "batch", "rank", "alpha", "max_length", "stages"):
        assert getattr(read, name) == getattr(default, name), name


@pytest.mark.parametrize("student", ["smollm2:135m-q4", 'odd"\\näme'])
def test_student_is_written_as_given(tmp_path: Path, student: str) -> None:
    write_example(tmp_path, student=student)
    assert tomllib.loads((tmp_path / "spill.toml").read_text(encoding="utf-8")) == {"student": student}


@pytest.mark.parametrize("student", ["", " ", "a\nb"])
def test_a_student_that_is_no_name_is_refused(tmp_path: Path, student: str) -> None:
    with pytest.raises(InputError, match=r"student .* is not a model's name"):
        write_example(tmp_path, student=student)
    assert list(tmp_path.iterdir()) == []


def test_every_file_is_written_and_relay_is_executable(tmp_path: Path) -> None:
    written = write_example(tmp_path / "new" / "relay")
    assert [path.name for path in written] == list(FILES)
    assert sorted(path.name for path in (tmp_path / "new" / "relay").iterdir()) == sorted(FILES)
    assert (tmp_path / "new/relay/relay.sh").stat().st_mode & stat.S_IXUSR
    assert not (tmp_path / "new/relay/spill.toml").stat().st_mode & stat.S_IXUSR


def test_a_directory_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(InputError, match=r"empty directory.* holds 'mine'") as caught:
        write_example(tmp_path)
    assert "\n" not in caught.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_in_the_way_is_an_error_of_one_line(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(InputError, match="example can") as caught:
        write_example(tmp_path / place)
    assert "\n" not in caught.value.message
    assert (tmp_path / "file").read_text() == "kept"


def test_importing_the_example_imports_no_numpy() -> None:
    code = "import sys, spill.example; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# relay.sh, with a stand-in that records how it was called. What spill does with the calls is tested elsewhere.

FAKE = r"""#!/usr/bin/env bash
{ printf '%s' "${SPILL_MACHINE:-}"; printf '\t%s' "$@"; printf '\n'; } >> "$CALLS"
case "$1 ${2:-}" in "doctor --names") printf '%s' "$NAMES"; exit 0 ;; esac
if [ "$1" = "${WAITS_AT:-}" ]; then
    trap 'exit 130' INT
    : > "$CALLS.waits"
    while [ ! -e "$CALLS.go" ]; do sleep 0.05; done
fi
if [ "$1" = "${FAILS_AT:-}" ]; then exit "$CODE"; fi
"""


class Relay:
    """relay.sh of a written example, and the calls that it made: (machine, command, arguments...) each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        write_example(root / "relay")
        self.fake = root / "spill fake"
        self.fake.write_text(FAKE)
        self.fake.chmod(0o755)
        self.calls_file = root / "calls"
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("SPILL")}
        self.environment |= {"SPILL": str(self.fake), "CALLS": str(self.calls_file), "NAMES": "fast\nslow\n"}

    def start(self, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["relay/relay.sh", *arguments],
            cwd=self.root,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A test run in the background of a shell ignores SIGINT, and what it starts would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err

    def calls(self) -> list[list[str]]:
        return [line.split("\t") for line in self.calls_file.read_text().splitlines()]

    def wait_until_held(self) -> None:
        deadline = time.monotonic() + 20
        while not Path(f"{self.calls_file}.waits").exists():
            assert time.monotonic() < deadline, "relay.sh never came to the command that waits"
            time.sleep(0.02)

    def let_go(self) -> None:
        Path(f"{self.calls_file}.go").touch()


@pytest.fixture
def relay(tmp_path: Path) -> Relay:
    return Relay(tmp_path)


def whole(state: str, first: str, second: str) -> list[list[str]]:
    return [
        ["", "doctor", "--names"],
        ["alpha", "build", "relay", "--state", state, "--stop-after", "tune:20", "--engine", first],
        ["beta", "resume", "relay", "--state", state, "--engine", second],
        ["alpha", "build", "relay", "--state", f"{state}-reference", "--engine", first],
        ["", "table", state, "--reference", f"{state}-reference"],
    ]


def test_relay_is_valid_bash(folder: Path) -> None:
    assert subprocess.run(["bash", "-n", folder / "relay.sh"], check=False).returncode == 0


def test_relay_hands_over_to_another_engine(relay: Relay) -> None:
    code, out, err = relay.run()
    assert (code, err) == (0, "")
    assert relay.calls()[:-1] == whole("relay/relay-state", "fast", "slow")
    assert relay.calls()[-1][:5] == ["", "ask", "relay", "--state", "relay/relay-state"]
    assert re.findall(r"(?m)^\[(\d)/5\] ", out) == ["1", "2", "3", "4", "5"]
    assert "beta (slow, another engine on the same machine)" in out
    assert re.search(r"done, in \d+ s", out)
    assert "to start anew, delete relay/relay-state and relay/relay-state-reference" in out


def test_the_question_is_in_neither_file(relay: Relay) -> None:
    relay.run()
    question = relay.calls()[-1][5]
    known = [r["prompt"] for name in ("train.jsonl", "evals.jsonl") for r in rows(relay.root / "relay", name)]
    assert all(len(tokens(question) & tokens(p)) / len(tokens(question)) < 0.8 for p in known)


def test_relay_with_one_engine_uses_a_second_process_and_says_so(relay: Relay) -> None:
    code, out, _ = relay.run(NAMES="only\n")
    assert code == 0
    assert relay.calls()[:-1] == whole("relay/relay-state", "only", "only")
    assert "a second process, for lack of another engine here" in out


def test_engines_and_state_can_be_named(relay: Relay) -> None:
    code, out, _ = relay.run("--engine-first", "slow", "--state", "my state/")
    assert code == 0
    assert relay.calls()[:-1] == whole("my state", "slow", "fast")
    assert "--state 'my state'" in out

    relay.calls_file.unlink()
    code, out, _ = relay.run("--engine-second", "fast")
    assert code == 0
    assert relay.calls()[:-1] == whole("relay/relay-state", "fast", "fast")
    assert "the same engine in a second process" in out


@pytest.mark.parametrize(
    ("arguments", "state", "copied", "command"),
    [
        ([], "relay/relay-state", "relay/relay-state ", "spill resume ./relay-state"),
        (["--state", "./here"], "./here", "./here ", "spill resume ./here"),
        (["--state", "s3://b/x"], "s3://b/x", "nothing: the state is at s3://b/x", "spill resume s3://b/x"),
        (["--engine-second", "m"], "relay/relay-state", "relay/relay-state ", "spill resume ./relay-state --engine m"),
    ],
)
def test_two_machines_does_the_first_half_and_says_what_is_next(
    relay: Relay, arguments: list[str], state: str, copied: str, command: str
) -> None:
    code, out, err = relay.run("--two-machines", *arguments)
    assert (code, err) == (0, "")
    assert relay.calls() == [
        ["", "doctor", "--names"],
        ["", "build", "relay", "--state", state, "--stop-after", "tune:20", "--engine", "fast"],
    ]
    assert f"copy   {copied}" in out
    assert re.search(rf"(?m)^ *run    {re.escape(command)}$", out)


@pytest.mark.parametrize(("at", "count"), [("build", 2), ("resume", 3), ("table", 5), ("ask", 6)])
def test_exit_codes_pass_through_and_end_the_relay(relay: Relay, at: str, count: int) -> None:
    code, _, err = relay.run(FAILS_AT=at, CODE="76")
    assert code == 76
    assert len(relay.calls()) == count
    assert "ended with exit code 76" in err
    assert err.endswith("\n  relay/relay.sh\n")


def test_ctrl_c_waits_for_spill_and_says_how_to_go_on(relay: Relay) -> None:
    process = relay.start("--state", "it's mine", WAITS_AT="resume")
    relay.wait_until_held()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert [call[1] for call in relay.calls()] == ["doctor", "build", "resume"]
    assert "saved" in err
    assert err.endswith("\n  relay/relay.sh --state 'it'\\''s mine'\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_that_only_the_script_saw_stops_it_before_the_next_step(
    relay: Relay, number: signal.Signals, code: int
) -> None:
    process = relay.start(WAITS_AT="resume")
    relay.wait_until_held()
    process.send_signal(number)
    relay.let_go()
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert [call[1] for call in relay.calls()] == ["doctor", "build", "resume"]
    assert "saved" in err


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [(["--what"], "unknown argument: --what"), (["--state"], "--state needs a value"), (["x"], "unknown argument: x")],
)
def test_wrong_usage_is_2_and_calls_nothing(relay: Relay, arguments: list[str], fault: str) -> None:
    code, out, err = relay.run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"relay.sh: {fault}\nusage: ")
    assert not relay.calls_file.exists()


def test_help_is_0_and_calls_nothing(relay: Relay) -> None:
    code, out, _ = relay.run("--help")
    assert code == 0
    assert out.startswith("usage: relay.sh ")
    assert not relay.calls_file.exists()


def test_no_engine_and_no_spill_are_said(relay: Relay) -> None:
    code, _, err = relay.run(NAMES="")
    assert code == 1
    assert "no engine is available here" in err
    assert relay.calls() == [["", "doctor", "--names"]]
    code, _, err = relay.run(SPILL=str(relay.root / "absent"))
    assert code == 127
    assert "is not there: pip install" in err
