"""Bad folders: every fault is told at once, by file and line, before any model is touched; good ones are read."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from spill import folder
from spill.errors import InputError
from spill.folder import Folder, load, make_settings, parse
from tests.conftest import Spill

ROW = b'{"prompt": "a", "answer": "b"}\n'
EXAM = b'{"prompt": "c", "expected": "d"}\n'


def read(**files: bytes) -> Folder:
    """A folder in memory; `train` and `exam` default to one good row each."""
    names = {"train": "train.jsonl", "exam": "evals.jsonl", "toml": "spill.toml", "instructions": "instructions.txt"}
    given = {"train": ROW, "exam": EXAM, **files}
    return parse({names[key]: data for key, data in given.items()}, "F")


def faults(**files: bytes) -> list[str]:
    with pytest.raises(InputError) as caught:
        read(**files)
    assert "\n" not in caught.value.message
    assert all("\n" not in detail for detail in caught.value.details)
    return list(caught.value.details)


# ---- what is fine


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\xef\xbb\xbf" + ROW, id="BOM"),
        pytest.param(ROW.replace(b"\n", b"\r\n"), id="CRLF"),
        pytest.param(b"\xef\xbb\xbf" + ROW.replace(b"\n", b"\r\n"), id="BOM and CRLF"),
        pytest.param(ROW.rstrip(), id="no final newline"),
        pytest.param(ROW + b"\n \n\t\r\n\n", id="trailing blanks"),
        pytest.param(b"\n\r\n" + ROW, id="leading blanks"),
        pytest.param(b'{"id": 7, "prompt": "a", "tags": [1, {"x": null}], "answer": "b"}\n', id="further columns"),
        pytest.param(b'  {"answer":"b","prompt":"a"}  \n', id="another order and spaces"),
    ],
)
def test_harmless_forms_are_read(data: bytes) -> None:
    (row,) = read(train=data).training
    assert (row.prompt, row.answer) == ("a", "b")


def test_rows_keep_the_lines_of_their_file() -> None:
    made = read(train=b"\n" + ROW + b"\n\n" + ROW, exam=b"\r\n\r\n" + EXAM)
    assert [row.line for row in made.training] == [2, 5]
    assert [row.line for row in made.exam] == [3]


def test_text_is_kept_character_by_character() -> None:
    text = "  É\u2028\x00 \U0001f600\t\r\n"
    made = read(train=json.dumps({"prompt": text, "answer": text}).encode())
    assert (made.training[0].prompt, made.training[0].answer) == (text, text)


def test_expected_is_one_text_or_several() -> None:
    made = read(exam=EXAM + b'{"prompt": "c", "expected": ["d", " e", "d"]}\n')
    assert [row.expected for row in made.exam] == [("d",), ("d", " e", "d")]


def test_instructions_may_be_absent_and_lose_outer_white_space() -> None:
    assert read().instructions == ""
    assert read(instructions=b"\xef\xbb\xbf\r\n Be brief.\r\nAlways. \n").instructions == "Be brief.\r\nAlways."


def test_a_large_row_below_the_limit_works() -> None:
    prompt = "x" * (folder.ROW_LIMIT - 100)
    assert read(train=json.dumps({"prompt": prompt, "answer": "b"}).encode()).training[0].prompt == prompt


# ---- what is not


@pytest.mark.parametrize("column", ["answer", "expected"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("3", "is 3, give a text"),
        ("null", "is null, give a text"),
        ("true", "is true, give a text"),
        ("{}", "is an object, give a text"),
        ('""', 'is "", give a text that is not empty'),
        ('"  "', 'is "  ", give a text that is not empty'),
        ('"\\n\\u00a0"', 'is "\\n\\u00a0", give a text that is not empty'),
        ('"\\ud800"', "holds half of a surrogate pair, which is no character"),
        ('"ok \\udc00"', "holds half of a surrogate pair, which is no character"),
        ("1e999", "is Infinity, give a text"),
    ],
)
def test_an_answer_that_is_no_text_is_named_with_its_line(column: str, value: str, said: str) -> None:
    name, key = ("train.jsonl", "train") if column == "answer" else ("evals.jsonl", "exam")
    good = ROW if column == "answer" else EXAM
    bad = f'{{"prompt": "a", "{column}": {value}}}\n'.encode()
    assert faults(**{key: good + b"\n" + bad}) == [f"{name}:3: {column!r} {said}"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("[]", "'expected' is an empty list, give a text or a list of texts"),
        ('["a", 3]', "'expected' is a list in which one is 3, give a text"),
        ('["a", " "]', "'expected' is a list in which one is \" \", give a text that is not empty"),
        ('["a", ["b"]]', "'expected' is a list in which one is a list, give a text"),
    ],
)
def test_a_list_of_accepted_answers_holds_texts_only(value: str, said: str) -> None:
    assert faults(exam=f'{{"prompt": "a", "expected": {value}}}\n'.encode()) == [f"evals.jsonl:1: {said}"]


def test_a_list_is_no_answer_to_train_on() -> None:
    assert faults(train=b'{"prompt": "a", "answer": ["b"]}\n') == ["train.jsonl:1: 'answer' is a list, give a text"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"\xff", "byte 0xff is not UTF-8; save the file as UTF-8"),
        (b'{"prompt": "caf\xe9", "answer": "b"}', "byte 0xe9 is not UTF-8; save the file as UTF-8"),
        (b'{"prompt": "a"', "not JSON: Expecting ',' delimiter at column 15"),
        (b'{"prompt": "a", "answer": "b"} x', "not JSON: Extra data at column 32"),
        (b'["a", "b"]', 'not a JSON object; give a line such as {"prompt": "...", "answer": "..."}'),
        (b"null", 'not a JSON object; give a line such as {"prompt": "...", "answer": "..."}'),
        (b'{"prompt": NaN, "answer": "b"}', "NaN is not JSON"),
        (b'{"prompt": "a", "answer": "b", "weight": -Infinity}', "-Infinity is not JSON"),
        (b'{"prompt": "a", "answer": "b", "answer": "c"}', "the key 'answer' is given twice"),
        (b'{"prompt": "a", "answer": "b", "x": {"y": 1, "y": 2}}', "the key 'y' is given twice"),
        (b'{"prompt": "a"}', "no column 'answer', only 'prompt'"),
        (b'{"Prompt": "a", "answer": "b"}', "no column 'prompt', only 'Prompt', 'answer'"),
        (b'{"prompt": "a", "answer": "b", "n": ' + b"9" * 5000 + b"}", "not JSON: a number has too many digits"),
        (b"[" * 100_000 + b"]" * 100_000, "not JSON: nested too deeply"),
        (b'{"prompt": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}", "not JSON: nested too deeply"),
    ],
)
def test_a_malformed_row_is_named_with_its_line_and_reason(line: bytes, said: str) -> None:
    assert faults(train=ROW + line + b"\n" + ROW) == [f"train.jsonl:2: {said}"]


@pytest.mark.parametrize("depth", [100, 900, 960, 980, 990, 1000, 3000])
def test_nesting_of_any_depth_ends_in_one_line(depth: int) -> None:
    (fault,) = faults(train=b'{"prompt": ' + b"[" * depth + b"]" * depth + b', "answer": "b"}')
    assert fault in ("train.jsonl:1: 'prompt' is a list, give a text", "train.jsonl:1: not JSON: nested too deeply")


def test_a_row_of_20_mb_meets_a_clear_limit() -> None:
    large = json.dumps({"prompt": "x" * 20_000_000, "answer": "b"}).encode()
    assert faults(train=ROW + large) == ["train.jsonl:2: 20,000,029 bytes, a row may have 1,048,576"]


@pytest.mark.parametrize("data", [b"", b"\n", b"\xef\xbb\xbf", b" \r\n\t\n"])
def test_a_file_without_rows_is_a_fault(data: bytes) -> None:
    assert faults(train=data) == ['train.jsonl: no rows; give lines such as {"prompt": "...", "answer": "..."}']
    assert faults(exam=data) == ['evals.jsonl: no rows; give lines such as {"prompt": "...", "expected": "..."}']


def test_every_fault_of_every_file_is_told_at_once() -> None:
    assert faults(
        train=b'{"prompt": "", "answer": 3}\n' + ROW + b"oops\n",
        exam=b'{"expected": []}\n',
        instructions=b"one\ntwo \xff",
        toml=b'student = "x"\nlerning_rate = 1e-3\nbatch = 0\n',
    ) == [
        "train.jsonl:1: 'prompt' is \"\", give a text that is not empty",
        "train.jsonl:1: 'answer' is 3, give a text",
        "train.jsonl:3: not JSON: Expecting value at column 1",
        "evals.jsonl:1: no column 'prompt', only 'expected'",
        "evals.jsonl:1: 'expected' is an empty list, give a text or a list of texts",
        "instructions.txt:2: byte 0xff is not UTF-8; save the file as UTF-8",
        "spill.toml:2: unknown key 'lerning_rate'; known: student, engine, dtype, seed, epochs, batch, learning_rate, "
        "rank, alpha, max_length, stages, reference",
        "spill.toml:3: batch is 0: give a whole number from 1 to 1000000000",
    ]


def test_many_faults_are_counted_and_the_first_fifty_shown() -> None:
    with pytest.raises(InputError, match=r"^F has 1001 faults; mend them and run again$") as caught:
        read(train=b"x\n" * 1000 + ROW, exam=b"x\n" + EXAM)
    assert len(caught.value.details) == 51
    assert caught.value.details[-1] == "and 951 more"


def test_exam_rows_found_in_training_are_warned_of() -> None:
    made = read(train=ROW, exam=EXAM + b'{"prompt": " A ", "expected": "b"}\n')
    assert made.warnings == ("evals.jsonl:2 asks what train.jsonl:1 trains on",)
    many = read(train=ROW, exam=b'{"prompt": "a", "expected": "b"}\n' * 100)
    assert len(many.warnings) == 6
    assert many.warnings[-1] == "and 95 more"


# ---- spill.toml


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        (b"batch = \n", "spill.toml:1: not TOML: Invalid value at column 9"),
        (b"seed = 1\nseed = 2", "spill.toml: not TOML: Cannot overwrite a value (at end of document)"),
        (b"seed = 1\nbatch = \xff", "spill.toml:2: byte 0xff is not UTF-8; save the file as UTF-8"),
        (b"a = " + b"[" * 100_000, "spill.toml: nested too deeply"),
        (b"# \n\nseed = -1\n", "spill.toml:3: seed is -1: give a whole number from 0"),
        (b"seed = true\n", "spill.toml:1: seed is true: give a whole number from 0"),
        (b"seed = 0x" + b"f" * 5000, "spill.toml:1: seed is a number of too many digits: give a whole number from 0"),
        (b"epochs = 0\n", "spill.toml:1: epochs is 0: give a whole number from 1 to 1000000000"),
        (b"epochs = 1.0\n", "spill.toml:1: epochs is 1.0: give a whole number from 1 to 1000000000"),
        (b'batch = "4"\n', 'spill.toml:1: batch is "4": give a whole number from 1 to 1000000000'),
        (b"max_length = 1\n", "spill.toml:1: max_length is 1: give a whole number from 2 to 1000000000"),
        (b"learning_rate = nan\n", "spill.toml:1: learning_rate is NaN: give a number from 0 to 10, such as 1e-3"),
        (b"learning_rate = -1\n", "spill.toml:1: learning_rate is -1: give a number from 0 to 10, such as 1e-3"),
        (b"alpha = inf\n", "spill.toml:1: alpha is Infinity: give a number above 0, such as 32"),
        (b"alpha = 0\n", "spill.toml:1: alpha is 0: give a number above 0, such as 32"),
        (b'dtype = "float16"\n', 'spill.toml:1: dtype is "float16": give float32 or bfloat16'),
        (b'student = " "\n', 'spill.toml:1: student is " ": give a text that is not empty'),
        (b"engine = 3\n", "spill.toml:1: engine is 3: give a text that is not empty"),
        (
            b"stages = []\n",
            'spill.toml:1: stages is []: give a list of stage names, such as ["eval:base", "tune", "eval:tuned"]',
        ),
        (
            b'stages = ["tune", "Tune"]\n',
            'spill.toml:1: stages is ["tune", "Tune"]: two stages have the same name (case does not count)',
        ),
        (
            b'stages = ["eval:tuned", "tune"]\n',
            'spill.toml:1: stages is ["eval:tuned", "tune"]: eval:tuned needs tune before it; put tune first or leave '
            "eval:tuned out",
        ),
        (b"[tune]\nbatch = 4\n", "spill.toml:1: unknown key 'tune'; known: "),
    ],
)
def test_an_impossible_setting_is_named_with_its_line(toml: bytes, said: str) -> None:
    (fault,) = faults(toml=toml)
    assert fault == said or (said.endswith("known: ") and fault.startswith(said))


def test_a_toml_of_windows_is_read() -> None:
    settings = read(toml=b"\xef\xbb\xbfseed = 7\r\nalpha = 8\r\nlearning_rate = 0\r\n").settings({})
    assert (settings.seed, settings.alpha, settings.learning_rate) == (7, 8.0, 0.0)
    assert type(settings.alpha) is type(settings.learning_rate) is float


def test_flags_win_over_the_file_and_are_checked_alike() -> None:
    made = read(toml=b"seed = 7\nbatch = 2\n")
    assert made.settings({"seed": 8}).seed == 8
    assert made.settings({"seed": 8}).batch == 2
    with pytest.raises(InputError, match=r"^2 settings cannot be used; change and run again$") as caught:
        make_settings({"seed": -1, "batch": 1, "epochs": 0})
    assert caught.value.details == (
        "seed is -1: give a whole number from 0",
        "epochs is 0: give a whole number from 1 to 1000000000",
    )


# ---- the folder itself


def make(directory: Path, files: Mapping[str, bytes]) -> Path:
    directory.mkdir(exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return directory


def refused(directory: Path) -> tuple[str, list[str]]:
    with pytest.raises(InputError) as caught:
        load(directory)
    return caught.value.message, list(caught.value.details)


def test_a_missing_folder_a_file_and_an_empty_folder(tmp_path: Path) -> None:
    hint = "`spill example relay` writes a folder to begin with"
    assert refused(tmp_path / "gone") == (f"{tmp_path}/gone does not exist; {hint}", [])
    (tmp_path / "file").write_text("x")
    assert refused(tmp_path / "file") == (f"{tmp_path}/file is a file, not a folder; {hint}", [])
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty") == (
        f"{tmp_path}/empty holds neither evals.jsonl nor train.jsonl; {hint}",
        [],
    )
    long = tmp_path / ("x" * 300)
    assert refused(long) == (f"the folder {long} cannot be read: File name too long", [])


def test_a_missing_file_is_told_together_with_the_faults_of_the_others(tmp_path: Path) -> None:
    directory = make(tmp_path, {"train.jsonl": b"x\n", "spill.toml": b"seed = -1\n"})
    assert refused(directory) == (
        f"{directory} has 3 faults; mend them and run again",
        [
            'evals.jsonl: missing; a file of lines such as {"prompt": "...", "expected": "..."}',
            "train.jsonl:1: not JSON: Expecting value at column 1",
            "spill.toml:1: seed is -1: give a whole number from 0",
        ],
    )


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    directory = make(tmp_path, {"evals.jsonl": EXAM, "train.jsonl": ROW})
    (directory / "instructions.txt").mkdir()
    os.mkfifo(directory / "spill.toml")  # reading it would wait for ever
    assert refused(directory)[1] == ["instructions.txt: not a file", "spill.toml: not a file"]


def test_a_file_that_cannot_be_read_or_is_too_large_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make(tmp_path, {"evals.jsonl": EXAM * 10})
    (directory / "train.jsonl").symlink_to("train.jsonl")
    monkeypatch.setattr(folder, "FILE_LIMIT", 100)
    assert refused(directory)[1] == [
        "evals.jsonl: 330 bytes, a file may have 100",
        "train.jsonl: cannot be read: Too many levels of symbolic links",
    ]


# ---- through the command line


def test_check_lists_everything_and_touches_no_model(spill: Spill, tmp_path: Path, home: Path) -> None:
    directory = make(tmp_path / "f", {"train.jsonl": b"x\n", "evals.jsonl": EXAM, "spill.toml": b'student = "no:such"'})
    done = spill("check", directory)
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines() == [
        f"spill: {directory} has 1 fault; mend it and run again",
        "  train.jsonl:1: not JSON: Expecting value at column 1",
    ]
    assert not home.exists()
    make(directory, {"train.jsonl": ROW * 3, "evals.jsonl": EXAM * 2})
    assert spill("check", directory).out == (
        f"{directory}: 3 training rows, 2 exam rows, no faults; next: spill build {directory}\n"
    )


def test_build_refuses_a_faulty_folder_before_anything_else(spill: Spill, tmp_path: Path, home: Path) -> None:
    directory = make(
        tmp_path / "f",
        {"train.jsonl": b'{"prompt": "a"}\n', "evals.jsonl": EXAM, "spill.toml": b'student = "/gone"\nengine = "x"\n'},
    )
    done = spill("build", directory)
    assert done.code == 1
    assert done.err.splitlines()[1] == "  train.jsonl:1: no column 'answer', only 'prompt'"
    assert not home.exists()
    assert sorted(p.name for p in directory.iterdir()) == ["evals.jsonl", "spill.toml", "train.jsonl"]


def test_a_bom_and_crlf_go_through_the_state_and_back(spill: Spill, folder: Path, model: Path, tmp_path: Path) -> None:
    for name in ("train.jsonl", "evals.jsonl", "instructions.txt"):
        path = folder / name
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert spill("build", folder, "--state", tmp_path / "s", "--stop-after", "eval:base:1").code == 0
    done = spill("resume", tmp_path / "s", "--student", model, "--engine", "numpy", "--stop-after", "eval:base")
    assert done.code == 0, done.err
