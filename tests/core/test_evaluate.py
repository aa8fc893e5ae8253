"""The exam: the one grading rule, raw outputs, truncated rows, the token limit, stop ids, and stops at any row."""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from attrs import evolve

from spill.engine import Completion, Engine, Float32, Int32, Row, TrainingState
from spill.errors import PluginError, StateError
from spill.folder import ExamRow, parse
from spill.handover import probe_rows, rounded_losses
from spill.models import stop_ids
from spill.models.directory import read_directory
from spill.plan import make_plan, prepare
from spill.plugins import discover
from spill.recipe import initial_state
from spill.stages import Saved, Work
from spill.stages.evaluate import Evaluation, is_right, open_base, open_tuned
from spill.stages.tune import STATE_ROLE, state_parts
from spill.testing.models import TURN_END, tiny_model
from tests.conftest import Spill, write_folder
from tests.core.builds import head, journal

pytestmark = pytest.mark.usefixtures("quick")


# ---- the rule


@pytest.mark.parametrize(
    ("output", "right"),
    [
        ("yes", True),
        (" yes", True),
        ("yes\n", True),
        ("\t yes \r\n", True),
        ("\u00a0yes\u2028", True),  # white space is what Unicode calls so
        ("Yes", False),
        ("yes.", False),
        ("yes no", False),
        ("y es", False),
        ("", False),
        (" ", False),
        ("no", False),
        ("\u200byes", False),  # a zero-width space is no white space
    ],
)
def test_outer_white_space_is_stripped_and_nothing_else(output: str, right: bool) -> None:
    assert is_right(output, ExamRow(line=1, prompt="p", expected=("yes",))) is right


def test_white_space_around_the_expected_answer_counts_as_little() -> None:
    assert is_right("yes", ExamRow(line=1, prompt="p", expected=(" yes\n",)))


def test_inner_white_space_counts() -> None:
    row = ExamRow(line=1, prompt="p", expected=("a  b",))
    assert is_right(" a  b ", row)
    assert not is_right("a b", row)


def test_any_of_the_accepted_answers_is_right() -> None:
    row = ExamRow(line=1, prompt="p", expected=("yes", "Yes", "yes."))
    assert [is_right(output, row) for output in ("yes", "Yes", "yes.", "YES", "yes yes")] == [True] * 3 + [False] * 2


def test_characters_are_compared_as_they_are() -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    assert not is_right(decomposed, ExamRow(line=1, prompt="p", expected=(composed,)))


# ---- the stage on an engine with a script


class Scripted:
    """An engine that answers what it is told to, in the order it is told to."""

    def __init__(self, answers: Sequence[tuple[str, str]], order: Callable[[list[int]], list[int]] = list) -> None:
        self.answers = answers
        self.order = order
        self.asked: list[dict[str, Any]] = []
        self.imported: list[TrainingState] = []
        self.closed = 0
        self.index_of = lambda index: index
        self.prompts: dict[bytes, int] = {}

    def generate(
        self, prompts: Sequence[Int32], max_new_tokens: int, stop_ids: Sequence[int], adapter: bool = True
    ) -> Iterator[Completion]:
        self.asked.append({"prompts": prompts, "limit": max_new_tokens, "stop": tuple(stop_ids), "adapter": adapter})
        try:
            for index in self.order(list(range(len(prompts)))):
                row = self.row_of(prompts[index])
                text, reason = self.answers[row]
                tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
                yield Completion(index=self.index_of(index), tokens=tokens, reason=cast(Any, reason))
        finally:
            self.closed += 1

    def row_of(self, prompt: Int32) -> int:
        """The exam row that a prompt asks: rows ask `tell 0`, `tell 1` ..."""
        text = bytes(t for t in prompt.tolist() if t < 256).decode()
        return int(text.rpartition("tell ")[2].split("\n")[0])

    def import_state(self, state: TrainingState) -> None:
        self.imported.append(state)

    def nll(self, rows: Sequence[Row], adapter: bool = True) -> list[Float32]:
        return [np.ones(int(row.mask.sum()), np.float32) for row in rows]


class Exam:
    """An exam of rows `tell 0` ... with their accepted answers, over a scripted engine."""

    def __init__(self, model: Path, expected: Sequence[object], instructions: str = "Say yes or no.") -> None:
        rows = "".join(json.dumps({"prompt": f"tell {i}", "expected": e}) + "\n" for i, e in enumerate(expected))
        contents = {
            "train.jsonl": b'{"prompt": "say", "answer": "yes"}\n' * 3,
            "evals.jsonl": rows.encode(),
            "instructions.txt": instructions.encode(),
        }
        self.folder = parse(contents, "F")
        settings = self.folder.settings({})
        found = read_directory(model, student="local", tick=lambda: None)
        self.student = prepare(found, stop_ids(found), self.folder, settings, lambda: None)
        self.plan = make_plan(self.folder, settings, self.student, "float32", discover(), {}, "local", None)

    def work(self, engine: Scripted, saved: Saved | None = None, name: str = "eval:base") -> Work:
        return Work(
            name=name,
            plan=self.plan,
            folder=self.folder,
            text=self.student.text,
            rows=self.student.rows,
            adapter=self.student.adapter,
            engine=lambda: cast(Engine, engine),
            saved=saved,
            others={"tune": self.tuned()},
            taken_over=lambda: "",
            accept_drift=False,
            note=lambda text: None,
            say=lambda line: None,
        )

    def tuned(self) -> Saved:
        """A finished tune whose probe is what the scripted engine answers."""
        state = b"".join(bytes(part) for part in state_parts(initial_state(self.student.adapter, 0)))
        probed = [self.student.rows[i] for i in probe_rows(self.student.rows)]
        losses = rounded_losses(Scripted([]).nll(probed))
        return Saved(
            position=2,
            total=2,
            finished=True,
            summary={"probe": losses},
            roles=(STATE_ROLE,),
            read=lambda role: state,
        )


def saved_from(stage: Evaluation, before: Mapping[str, bytes] | None = None) -> tuple[Saved, dict[str, bytes]]:
    """A snapshot as a state would hold it."""
    snapshot = stage.snapshot()
    old = before or {}
    objects = {role: old[role] for role in snapshot.kept}
    objects |= {role: b"".join(bytes(part) for part in parts) for role, parts in snapshot.objects.items()}
    saved = Saved(
        position=stage.position,
        total=stage.total,
        finished=stage.position == stage.total,
        summary=snapshot.summary,
        roles=tuple(objects),
        read=lambda role: objects[role],
    )
    return saved, objects


def records(objects: Mapping[str, bytes]) -> list[dict[str, Any]]:
    return [record for role in sorted(objects) for record in json.loads(objects[role])]


def finish(stage: Evaluation) -> None:
    for _ in stage.advance(stage.total):
        pass


def test_raw_outputs_are_kept_and_graded(model: Path) -> None:
    outputs = [
        (" yes\n", "stop"),
        ("Yes", "stop"),
        ("yes.", "stop"),
        ("", "stop"),
        ("ja", "stop"),
        ("é\x00\x1b[0m", "stop"),
    ]
    exam = Exam(model, ["yes", "yes", "yes", "yes", ["yes", "ja"], "no"])
    stage = open_base(exam.work(Scripted(outputs)))
    finish(stage)
    saved, objects = saved_from(stage)
    made = records(objects)
    assert [record["row"] for record in made] == [0, 1, 2, 3, 4, 5]
    assert [record["output"] for record in made] == [text for text, _ in outputs]
    assert [record["right"] for record in made] == [True, False, False, False, True, False]
    assert [record["tokens"] for record in made] == [5, 3, 4, 0, 2, 7]
    assert saved.summary == {"right": 2, "score": 2 / 6, "truncated": 0}


def test_truncated_rows_are_counted(model: Path) -> None:
    exam = Exam(model, ["yes", "yes", "yes"])
    stage = open_base(exam.work(Scripted([("yes", "stop"), ("yesyesye", "length"), ("yes     ", "length")])))
    finish(stage)
    saved, objects = saved_from(stage)
    assert saved.summary["truncated"] == 2
    assert [record["ended"] for record in records(objects)] == ["stop", "length", "length"]


def test_the_token_limit_comes_from_the_longest_accepted_answer(model: Path) -> None:
    exam = Exam(model, ["no", ["yes", "certainly"], "perhaps"])
    assert exam.plan.max_new_tokens == len("certainly") + 1 + 4, "one end token, and room for white space"
    engine = Scripted([("no", "stop")] * 3)
    finish(open_base(exam.work(engine)))
    assert [asked["limit"] for asked in engine.asked] == [exam.plan.max_new_tokens]


def test_base_is_asked_with_instructions_and_tuned_without_them(model: Path) -> None:
    exam = Exam(model, ["yes"], instructions="Be brief.")
    base, tuned = Scripted([("yes", "stop")]), Scripted([("yes", "stop")])
    finish(open_base(exam.work(base)))
    finish(open_tuned(exam.work(tuned, name="eval:tuned")))
    text = exam.student.text
    assert base.asked[0]["prompts"][0].tolist() == text.prompt("tell 0", "Be brief.").tolist()
    assert tuned.asked[0]["prompts"][0].tolist() == text.prompt("tell 0").tolist()
    assert (base.asked[0]["adapter"], tuned.asked[0]["adapter"]) == (False, True)
    assert (len(base.imported), len(tuned.imported)) == (0, 1)


def test_the_stop_ids_are_the_union_of_what_every_file_names(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [10, 256]}))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": 257}))
    engine = Scripted([("yes", "stop")])
    exam = Exam(path, ["yes"])
    finish(open_base(exam.work(engine)))
    tokenizers_own = 258
    assert json.loads((path / "tokenizer_config.json").read_text())["eos_token"] == TURN_END
    assert engine.asked[0]["stop"] == (10, 256, 257, tokenizers_own)


def reverse(order: list[int]) -> list[int]:
    return order[::-1]


def shuffled(order: list[int]) -> list[int]:
    return random.Random(len(order)).sample(order, len(order))


@pytest.mark.parametrize("order", [list, reverse, shuffled])
@pytest.mark.parametrize("stops", [[1], [5], [2, 3, 6], [1, 2, 3, 4, 5, 6, 7]])
def test_a_stop_at_any_row_gives_the_same_rows(
    model: Path, stops: list[int], order: Callable[[list[int]], list[int]]
) -> None:
    answers = [("yes" if i % 3 else "no!", "stop" if i % 2 else "length") for i in range(8)]
    exam = Exam(model, ["yes"] * 8)
    whole = open_base(exam.work(Scripted(answers)))
    finish(whole)
    expected, objects = saved_from(whole)
    saved: Saved | None = None
    held: dict[str, bytes] = {}
    for place in [*stops, 8]:
        engine = Scripted(answers, order)
        stage = open_base(exam.work(engine, saved))
        for _ in stage.advance(place):
            pass
        assert len(engine.asked[0]["prompts"]) == place - (saved.position if saved else 0), (
            "no row is asked for nothing"
        )
        saved, held = saved_from(stage, held)
    assert saved is not None
    assert sorted(records(held), key=lambda r: r["row"]) == records(objects)
    assert saved.summary == expected.summary


def test_a_stop_in_the_middle_closes_the_engines_iterator(model: Path) -> None:
    engine = Scripted([("yes", "stop")] * 3)
    stage = open_base(Exam(model, ["yes"] * 3).work(engine))
    rows = stage.advance(3)
    next(rows)
    assert engine.closed == 0
    rows.close()
    assert engine.closed == 1
    assert stage.position == 1


@pytest.mark.parametrize("index", [-1, 3, 99])
def test_an_engine_that_answers_what_nobody_asked_is_refused(model: Path, index: int) -> None:
    engine = Scripted([("yes", "stop")] * 3)
    engine.index_of = lambda asked: index
    with pytest.raises(PluginError, match=f"eval:base: the engine answered prompt {index} unasked"):
        finish(open_base(Exam(model, ["yes"] * 3).work(engine)))


def test_an_engine_that_answers_a_row_twice_is_refused(model: Path) -> None:
    engine = Scripted([("yes", "stop")] * 3, order=lambda order: [0, 1, 1, 2])
    stage = open_base(Exam(model, ["yes"] * 3).work(engine))
    with pytest.raises(PluginError, match="answered prompt 1 unasked"):
        finish(stage)
    assert stage.position == 2


def test_an_engine_that_ends_early_is_refused(model: Path) -> None:
    engine = Scripted([("yes", "stop")] * 3, order=lambda order: order[:2])
    stage = open_base(Exam(model, ["yes"] * 3).work(engine))
    with pytest.raises(PluginError, match="ended after 2 of 3 rows; the last commit stands"):
        finish(stage)
    assert stage.position == 2


ROW = {"row": 0, "output": "yes", "right": True, "ended": "stop", "tokens": 3}


@pytest.mark.parametrize(
    "rows",
    [
        [ROW, ROW],
        [{**ROW, "row": 3}],
        [{**ROW, "row": -1}],
        [{**ROW, "row": True}],
        [{**ROW, "row": "0"}],
        [{**ROW, "right": 1}],
        [{**ROW, "right": None}],
        [{key: value for key, value in ROW.items() if key != "ended"}],
        [{}],
    ],
)
def test_graded_rows_that_cannot_be_are_refused(model: Path, rows: list[dict[str, Any]]) -> None:
    exam = Exam(model, ["yes"] * 3)
    stage = open_base(exam.work(Scripted([("yes", "stop")] * 3)))
    finish(stage)
    saved, _ = saved_from(stage)
    data = json.dumps(rows).encode()
    spoilt = evolve(saved, position=len(rows), finished=False, read=lambda role: data)
    with pytest.raises(StateError):
        open_base(exam.work(Scripted([]), spoilt))


def test_an_exam_of_the_tuned_model_needs_a_finished_tune(model: Path) -> None:
    exam = Exam(model, ["yes"])
    work = evolve(exam.work(Scripted([("yes", "stop")]), name="eval:tuned"), others={})
    with pytest.raises(StateError, match="eval:tuned needs a finished tune; list tune before it in stages"):
        finish(open_tuned(work))


# ---- through the command line


def test_cut_answers_are_said_with_the_limit_that_the_plan_records(spill: Spill, model: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", model, stages=["eval:base"])
    done = spill("build", folder)
    assert done.code == 0, done.err
    commit = head(folder / ".spill" / "state")
    cut = commit.stages["eval:base"].summary["truncated"]
    assert commit.plan.max_new_tokens == len("yes") + 1 + 4
    assert cut > 0, "the random model does not stop by itself"
    assert f"eval:base: {cut} of 5 answers were cut at 8 tokens" in done.out
    assert cut == sum(row["ended"] == "length" for row in journal(folder / ".spill" / "state", "eval:base"))


@pytest.mark.usefixtures("other_engines")
@pytest.mark.parametrize("place", [1, 3])
def test_rows_are_equal_after_a_stop_and_on_another_engine(
    spill: Spill, model: Path, tmp_path: Path, place: int
) -> None:
    folder = write_folder(tmp_path / "folder", model, stages=["eval:base"])
    assert spill("build", folder, "--state", tmp_path / "whole").code == 0
    stop = ["--stop-after", f"eval:base:{place}"]
    assert spill("build", folder, "--state", tmp_path / "halves", *stop).code == 0
    assert spill("resume", folder, "--state", tmp_path / "halves", "--engine", "other").code == 0
    assert journal(tmp_path / "halves", "eval:base") == journal(tmp_path / "whole", "eval:base")
