"""What a person reads: one line for every error, the right exit code, what to do next, and nothing for a terminal."""

import contextlib
import io
import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spill.cli import run
from spill.signals import StopRequest
from spill.testing.models import tiny_model
from spill.testing.plugins import install_plugin
from tests.conftest import Outcome, Spill, write_folder
from tests.core.builds import files, rewrite

pytestmark = pytest.mark.usefixtures("quick")

Start = Callable[..., "subprocess.Popen[str]"]

LOUD = """
from spill.plugins import Detection, EngineSpec, hookimpl

@hookimpl
def spill_engines():
    yield EngineSpec(name="loud", target="loud_plugin:open_engine", contract=1, summary="never to be opened",
                     detect=lambda: Detection(available=True, rank=-99, reason="for tests"))

def open_engine(**how):
    raise AssertionError("THE MODEL WAS LOADED")
"""


@pytest.fixture
def loud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> Path:
    """A good folder whose engine cries out when it is opened."""
    site = tmp_path / "loud-site"
    site.mkdir()
    (site / "loud_plugin.py").write_text(LOUD)
    install_plugin(site, distribution="spill-loud", module="loud_plugin")
    monkeypatch.syspath_prepend(str(site))
    return write_folder(tmp_path / "loud", model, engine="loud")


@pytest.fixture(scope="module")
def made(site: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two states beside it: `done`, and `half`, which stopped at step 2 of the tune."""
    top = tmp_path_factory.mktemp("made")
    folder = write_folder(top / "folder", model)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.syspath_prepend(str(site))
        patch.setenv("SPILL_HOME", str(top / "home"))
        patch.setenv("SPILL_MACHINE", "alpha")
        for state, stop in (("done", []), ("half", ["--stop-after", "tune:2"])):
            assert run(StopRequest(), ["build", str(folder), "--state", str(top / state), *stop]) == 0
    return top


def failed(done: Outcome, code: int, *parts: str) -> list[str]:
    """The error's details, after checking that it is one line with these parts."""
    assert done.code == code, (done.out, done.err)
    lines = done.err.splitlines()
    assert [line for line in lines if line.startswith("spill: ")] == lines[:1], done.err
    assert all(line.startswith("  ") for line in lines[1:]), done.err
    assert not re.search(r"Traceback|unexpected|THE MODEL WAS LOADED|\x1b|Error\(", done.err + done.out)
    for part in parts:
        assert part in lines[0]
    return [line.strip() for line in lines[1:]]


# ---- usage: exit 2, and where to read more


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--nonsense"], "No such option"),
        (["biuld", "f"], "No such command 'biuld'"),
        (["build"], "Missing argument 'FOLDER|URI'"),
        (["build", "f", "g"], "unexpected extra argument (g)"),
        (["build", "f", "--epochs", "many"], "'many' is not a valid integer"),
        (["build", "f", "--learning-rate", "fast"], "'fast' is not a valid float"),
        (["build", "f", "--dtype", "float16"], "'float16' is not one of 'float32', 'bfloat16'"),
        (["build", "f", "--commit-every", "-1"], "-1.0 is not in the range x>=0"),
        (["build", "f", "--state"], "Option '--state' requires an argument"),
        (["resume"], "Missing argument 'FOLDER|URI'"),
        (["check"], "Missing argument 'FOLDER'"),
        (["table"], "Missing argument 'FOLDER|URI'"),
        (["ask", "f", "hi", "--max-tokens", "0"], "0 is not in the range x>=1"),
        (["export", "f"], "Missing option '--out'"),
        (["example", "marathon"], "'marathon' is not 'relay'"),
        (["doctor", "now"], "unexpected extra argument (now)"),
        (["state"], "Usage"),
    ],
)
def test_a_wrong_use_is_exit_2_and_names_the_help(spill: Spill, arguments: list[str], part: str) -> None:
    done = spill(*arguments)
    assert done.code == 2
    assert part in done.err
    assert done.out == ""
    assert "Traceback" not in done.err
    if arguments != ["state"]:
        (line,) = done.err.splitlines()
        assert line.startswith("spill: ")
        assert line.endswith(" --help` says more")


# ---- bad input: known before any model is loaded


def test_a_folder_that_is_not_there(spill: Spill, tmp_path: Path) -> None:
    for command in (["build"], ["resume"], ["table"], ["ask"], ["export", "--out", "o"]):
        done = spill(command[0], tmp_path / "gone", *command[1:])
        failed(done, 1, f"there is no folder or state {tmp_path}/gone", "`spill example relay`")
    failed(spill("check", tmp_path / "gone"), 1, f"{tmp_path}/gone does not exist", "`spill example relay`")


def test_a_folder_without_a_build(spill: Spill, folder: Path) -> None:
    failed(spill("resume", folder), 1, "there is no state at", "to resume; `spill build FOLDER --state URI` begins one")
    for command in (["table"], ["ask", "hi"], ["export", "--out", "o"]):
        done = spill(command[0], folder, *command[1:])
        failed(done, 1, "there is no state at", "`spill build FOLDER` begins one")
    assert not (folder / ".spill").exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--epochs", "0"], "1 setting cannot be used; change and run again"),
        (["--learning-rate", "nan"], "1 setting cannot be used; change and run again"),
        (["--stages", "eval:tuned"], "1 setting cannot be used; change and run again"),
        (["--stages", "tune,TUNE"], "1 setting cannot be used; change and run again"),
        (["--stages", "tune,,eval:tuned"], "1 setting cannot be used; change and run again"),
        (["--stages", "tune,audit"], "unknown stage 'audit'; installed: eval:base, eval:tuned, tune; "),
        (["--engine", "tpu"], "unknown engine 'tpu'; installed: "),
        (["--student", "gpt9:900b"], "unknown student 'gpt9:900b': take qwen2.5:0.5b, "),
        (["--student", "./nowhere"], "there is no directory "),
        (["--stop-after", "lunch"], "--stop-after 'lunch' names no stage of this build; give one of eval:base, tune, "),
        (["--stop-after", "tune:0"], "--stop-after 'tune:0' names no stage of this build"),
        (["--stop-after", "tune:-1"], "--stop-after 'tune:-1' names no stage of this build"),
        (["--stop-after", "tune:x"], "--stop-after 'tune:x' names no stage of this build"),
        (["--stop-after", "tune:"], "--stop-after 'tune:' names no stage of this build"),
        (["--stop-after", "tune:1:2"], "--stop-after 'tune:1:2' names no stage of this build"),
        (["--stop-after", ":3"], "--stop-after ':3' names no stage of this build"),
        (["--stop-after", "tune:٣"], "--stop-after 'tune:٣' names no stage of this build"),
        (["--max-length", "5"], "10 rows do not fit the model; shorten what is too long, or raise max_length"),
        (["--rank", "64"], "rank is 64, but model.layers."),
        (["--state", "ftp://host/x"], "unknown store 'ftp'; installed: "),
    ],
)
def test_bad_input_is_told_before_the_model_is_loaded(
    spill: Spill, loud: Path, arguments: list[str], part: str
) -> None:
    before = files(loud)
    done = spill("build", loud, *arguments)
    failed(done, 1, part)
    assert files(loud) == before, "nothing was written either"


def test_the_loud_engine_is_loud(spill: Spill, loud: Path) -> None:
    """The checks above can fail: a good folder does open its engine."""
    done = spill("build", loud)
    assert done.code == 1
    assert done.err == "spill: engine 'loud' failed to open tiny: AssertionError: THE MODEL WAS LOADED\n"


def test_faults_of_the_folder_are_told_by_every_command_that_reads_it(spill: Spill, loud: Path) -> None:
    (loud / "train.jsonl").write_text('{"prompt": "a"}\n')
    for command in ("build", "check"):
        details = failed(spill(command, loud), 1, f"{loud} has 1 fault; mend it and run again")
        assert details == ["train.jsonl:1: no column 'answer', only 'prompt'"]


def test_check_tells_unknown_stages_and_engines(spill: Spill, loud: Path) -> None:
    toml = (loud / "spill.toml").read_text()
    (loud / "spill.toml").write_text(toml + 'stages = ["tune", "audit"]\n')
    failed(spill("check", loud), 1, "unknown stage 'audit'; installed: ")
    (loud / "spill.toml").write_text(toml.replace('"loud"', '"tpu"'))
    failed(spill("check", loud), 1, "unknown engine 'tpu'; installed: ")


def test_a_good_check_names_the_next_command(spill: Spill, loud: Path) -> None:
    done = spill("check", loud)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{loud}: 10 training rows, 5 exam rows, no faults; next: spill build {loud}\n"


def test_a_model_that_is_none_is_told_before_the_engine_opens(spill: Spill, loud: Path, tmp_path: Path) -> None:
    broken = tiny_model(tmp_path / "broken")
    (broken / "tokenizer.json").unlink()
    failed(spill("build", loud, "--student", broken), 1, "has no tokenizer.json; ")
    (broken / "model.safetensors").unlink()
    failed(spill("build", loud, "--student", broken), 1, "has no model*.safetensors: ")
    shutil.copy(loud / "train.jsonl", broken / "model.safetensors")
    failed(spill("build", loud, "--student", broken), 1, "model.safetensors")
    assert not (loud / ".spill").exists()


# ---- states


def test_a_states_uri_and_state_contradict_each_other(spill: Spill, made: Path) -> None:
    for command in (["build"], ["resume"], ["table"], ["ask"], ["export", "--out", "o"]):
        done = spill(command[0], made / "done", "--state", made / "half", *command[1:])
        failed(done, 1, f"{made}/done is a state already; leave --state out")
    failed(spill("table", "s3://bucket/x", "--state", "y"), 1, "s3://bucket/x is a state already; leave --state out")


def test_a_state_alone_asks_for_the_directory_it_was_made_from(spill: Spill, made: Path) -> None:
    for command in (["resume", "half"], ["ask", "done", "hi"], ["export", "done", "--out", "o"]):
        done = spill(command[0], made / command[1], *command[2:])
        failed(done, 1, "this build's student was a directory", "--student PATH")


def test_a_state_that_was_changed_is_one_line_everywhere(spill: Spill, made: Path, model: Path, tmp_path: Path) -> None:
    state = Path(shutil.copytree(made / "done", tmp_path / "state"))
    for entry in (state / "log").glob("*.json"):
        entry.write_text("not a commit")
    for command in (["table"], ["resume"], ["ask", "hi"], ["export", "--out", tmp_path / "o"]):
        done = spill(command[0], state, *command[1:])
        details = failed(done, 1, f"{state}: no commit of this state is whole")
        assert details
    state = Path(shutil.copytree(made / "done", tmp_path / "newer"))
    rewrite(state, lambda commit: commit.update(format=99))
    failed(spill("table", state), 1, "is of state format 99, this spill reads up to ", "upgrade spill-core")


def test_a_score_that_cannot_be_is_not_shown(spill: Spill, made: Path, tmp_path: Path) -> None:
    for score in (10**400, -1, 2, "1.0", True, None, [1]):
        state = Path(shutil.copytree(made / "done", tmp_path / f"state{len(str(score))}{type(score).__name__}"))
        rewrite(state, lambda commit, score=score: commit["stages"]["eval:tuned"]["summary"].update(score=score))
        done = spill("table", state)
        assert done.code == 0, done.err
        assert done.out.splitlines()[3].split()[-2:] == ["-", "-"]


# ---- ask and export


def test_the_tune_must_be_finished_first(spill: Spill, made: Path, tmp_path: Path) -> None:
    again = f"spill resume {made}/folder --state {made}/half"
    target = [made / "folder", "--state", made / "half"]
    said = "the tune is not finished, there is no adapter yet: "
    failed(spill("ask", *target, "hi"), 1, f"{said}{again}; ask the untrained model with --base")
    failed(spill("export", *target, "--out", tmp_path / "o"), 1, f"{said}{again}")
    assert not (tmp_path / "o").exists()
    done = spill("ask", *target, "hi", "--base")
    assert (done.code, done.err) == (0, "")


def test_a_build_without_a_tune_says_so(spill: Spill, model: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", model, stages=["eval:base"])
    assert spill("build", folder).code == 0
    failed(spill("ask", folder, "hi"), 1, "this build has no stage tune, so no adapter; ask the untrained model with")
    failed(spill("export", folder, "--out", tmp_path / "o"), 1, "this build has no stage tune, so no adapter")


def test_one_prompt_or_several(spill: Spill, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = [made / "folder", "--state", made / "done"]
    alone = [spill("ask", *target, prompt, "--max-tokens", 4).out for prompt in ("say 1", "say 2")]
    lines = iter(["say 1", "  ", "say 2"])

    def typed(prompt: str = "") -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    done = spill("ask", *target, "--max-tokens", 4)
    assert (done.code, done.err) == (0, "")
    assert done.out == "".join(alone)


def test_prompts_that_cannot_be_asked(spill: Spill, made: Path) -> None:
    target = [made / "folder", "--state", made / "done"]
    failed(spill("ask", *target, "say \udcff"), 1, "'say \\udcff' is not Unicode text")
    failed(spill("ask", *target, "x" * 600), 1, "the prompt has 6", " tokens, the model reads 512: shorten it")


def test_an_answer_is_safe_to_print(spill: Spill, made: Path) -> None:
    done = spill("ask", made / "folder", "--state", made / "done", "say 1", "--max-tokens", 64)
    assert done.code == 0
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", done.out)


def test_ask_takes_another_engine_and_refuses_an_unknown_one(spill: Spill, made: Path) -> None:
    target = [made / "folder", "--state", made / "done", "say 1", "--max-tokens", 2]
    assert spill("ask", *target, "--engine", "numpy").code == 0
    failed(spill("ask", *target, "--engine", "tpu"), 1, "unknown engine 'tpu'; installed: ")


def test_ask_follows_the_folders_engine_and_not_the_highest_rank(
    spill: Spill, loud: Path, made: Path, tmp_path: Path
) -> None:
    plugin = tmp_path / "loud-site" / "loud_plugin.py"
    plugin.write_text(LOUD.replace("-99", "9999"))
    target = ["--state", made / "done", "say 1", "--max-tokens", 2]
    assert spill("ask", made / "folder", *target).code == 0
    assert "THE MODEL WAS LOADED" in spill("ask", loud, *target).err


def test_export_needs_a_new_or_empty_folder(spill: Spill, made: Path, tmp_path: Path) -> None:
    target = ["export", made / "folder", "--state", made / "done", "--out"]
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    for name in ("file", "full"):
        out = tmp_path / name
        failed(spill(*target, out), 1, f"{out} is there already; give --out a folder that is new or empty")
    failed(spill(*target, tmp_path / "file" / "below"), 1, "cannot ", "give another --out")
    (tmp_path / "empty").mkdir()
    done = spill(*target, tmp_path / "empty")
    assert (done.code, done.err) == (0, "")
    assert sorted(p.name for p in (tmp_path / "empty").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert done.out.splitlines()[-1].startswith("next: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(")
    failed(spill(*target, tmp_path / "empty"), 1, "is there already")


def test_an_export_that_fails_leaves_nothing_in_the_way(
    spill: Spill, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = ["export", made / "folder", "--state", made / "done", "--out", tmp_path / "out"]

    def full(source: object, destination: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("spill.export.os.replace", full)
        failed(spill(*target), 1, f"cannot write {tmp_path}/out: No space left on device; give another --out")
    assert spill(*target).code == 0, "what the failed one left does not stand in the way"


def test_the_exported_config_names_the_targets_of_the_adapter(spill: Spill, made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert spill("export", made / "folder", "--state", made / "done", "--out", out).code == 0
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (16, 32.0, "LORA")
    assert str(made) not in (out / "adapter_config.json").read_text(), "no path of this machine"


# ---- looking


def test_the_table_of_a_finished_and_of_a_stopped_build(spill: Spill, made: Path) -> None:
    done = spill("table", made / "folder", "--state", made / "done", "--reference", made / "done")
    lines = done.out.splitlines()
    assert done.code == 0
    assert lines[0].split() == ["stage", "engine", "machine", "os", "score", "reference"]
    assert [line.split()[:2] for line in lines[1:4]] == [["1", "eval:base"], ["2", "tune"], ["3", "eval:tuned"]]
    assert lines[-1].startswith(f'next: spill ask {made}/folder --state {made}/done "..."')
    half = spill("table", made / "half").out.splitlines()
    assert half[2].split()[-2:] == ["2/6", "-"]
    assert half[3].split() == ["3", "eval:tuned", "-", "-", "-", "-", "-"]
    assert half[-1] == f"next: spill resume {made}/half"


def test_plugins_and_doctor_name_what_is_there(spill: Spill) -> None:
    listed = spill("plugins")
    assert (listed.code, listed.err) == (0, "")
    assert re.search(r"^builtin \(spill-core [0-9.]+\)$", listed.out, re.MULTILINE)
    assert "  stage  tune         tune a LoRA adapter" in listed.out
    assert "  store  file         a folder on this machine" in listed.out
    names = spill("doctor", "--names")
    assert (names.code, names.err) == (0, "")
    assert "numpy" in names.out.splitlines()


# ---- the shape of errors


def test_debug_shows_the_traceback(spill: Spill, tmp_path: Path, spill_process: Start) -> None:
    with spill_process("--debug", "table", tmp_path / "gone") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("Traceback (most recent call last):")
    assert err.splitlines()[-1].startswith("spill.errors.InputError: there is no folder or state ")
    with spill_process("table", tmp_path / "gone") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    (line,) = err.splitlines()
    assert line.startswith("spill: there is no folder or state ")


def test_what_nobody_foresaw_is_one_line_too(spill: Spill, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> None:
        raise KeyError("one\ntwo")

    monkeypatch.setattr("spill.folder.load", broken)
    done = spill("check", folder)
    assert done.code == 1
    assert done.err == "spill: unexpected KeyError: 'one\\ntwo' (--debug shows where)\n"


def test_elsewhere_than_on_a_terminal_there_are_plain_lines_only(spill_process: Start, folder: Path) -> None:
    with spill_process("build", folder, "--stop-after", "tune:2", FORCE_COLOR="1", COLUMNS="40") as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert err == ""
    assert not re.search(r"[\x1b\r\x08]|[━█▏]", out), "no colours, no bar"
    assert "  tune step 2/6, loss " in out
    assert out.splitlines()[-1] == f"stopped as asked at tune 2/6; next: spill resume {folder}"
    assert max(map(len, out.splitlines())) > 80, "lines are not folded to a terminal that is not there"


def test_debug_keeps_the_exit_code(folder: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    stop = StopRequest()
    stop.asked = signal.SIGTERM
    assert run(stop, ["--debug", "build", str(folder)]) == 75


def test_an_empty_state_is_refused(spill: Spill, loud: Path) -> None:
    failed(spill("build", loud, "--state", ""), 1, "a state's URI is empty")


def test_an_empty_target_is_refused(spill: Spill, loud: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(loud)
    failed(spill("build", ""), 1, "empty")


@pytest.mark.parametrize("state", ["file://", "file://here/there", "FILE://there"])
def test_a_file_uri_without_a_whole_path_is_refused(
    spill: Spill, loud: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert spill("build", loud, "--state", state).error.startswith(
        f"spill: {state!r} is not of the form file:///FOLDER"
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_uri_is_the_folder_that_it_names(spill: Spill, made: Path) -> None:
    assert spill("table", f"FILE://{made / 'done'}").code == 0


def test_a_home_of_nobody_is_one_line(spill: Spill, loud: Path) -> None:
    assert "Could not determine home directory" in spill("build", loud, "--state", "~nosuchuser/x").error


@pytest.mark.parametrize("state", ["s3:/bucket/run", "GS:/bucket", "file:/tmp/x"])
def test_a_uri_with_one_slash_makes_no_folder(
    spill: Spill, loud: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str
) -> None:
    monkeypatch.chdir(tmp_path)
    failed(spill("build", loud, "--state", state), 1, "one slash", f"write {state.replace(':/', '://')} ")
    assert not (tmp_path / state.split("/")[0]).exists()


def test_a_path_that_is_too_long_is_one_line(spill: Spill, tmp_path: Path) -> None:
    failed(spill("table", tmp_path / ("x" * 300)), 1, "File name too long")


def test_a_line_break_in_a_name_stays_within_the_line(spill: Spill, tmp_path: Path) -> None:
    failed(spill("table", tmp_path / "a\nspill: b"), 1, "there is no folder or state")


def test_a_reference_without_a_state_is_said(spill: Spill, made: Path, tmp_path: Path) -> None:
    done = spill("table", made / "done", "--reference", tmp_path / "nowhere")
    assert f"{tmp_path}/nowhere" in done.out + done.err


def test_the_next_command_of_a_build_without_a_tune_works(spill: Spill, model: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", model, stages=["eval:base"])
    last = spill("build", folder).out.splitlines()[-1]
    assert "--base" in last
    assert "spill export" not in last


def test_an_unknown_stage_is_told_before_the_model_is_looked_for(spill: Spill, loud: Path) -> None:
    failed(spill("build", loud, "--stages", "tune,audit", "--student", "gpt9:900b"), 1, "unknown stage 'audit'")


def test_check_tells_every_unknown_name_at_once(spill: Spill, loud: Path) -> None:
    toml = (loud / "spill.toml").read_text().replace('"loud"', '"tpu"')
    (loud / "spill.toml").write_text(toml + 'stages = ["tune", "audit", "report"]\n')
    done = spill("check", loud)
    assert all(name in done.err for name in ("audit", "report", "tpu"))


def test_answers_to_a_pipe_hold_no_prompt(spill_process: Start, made: Path) -> None:
    command = ["ask", made / "folder", "--state", made / "done", "--max-tokens", "2"]
    with spill_process(*command) as process:
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert out == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_prompt_ends_at_once_with_any_signal(
    spill_process: Start, made: Path, number: signal.Signals, code: int
) -> None:
    command = ["ask", made / "folder", "--state", made / "done", "--max-tokens", "2"]
    with spill_process(*command, stdin=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write("hello\n")
        process.stdin.flush()
        process.stdout.readline()  # it has answered, and waits for the next
        begun = time.monotonic()
        process.send_signal(number)
        assert process.wait(timeout=60) == code
        assert time.monotonic() - begun < 10
        assert process.stderr
        assert process.stderr.read().splitlines()[-1] == "spill: stopped; there was nothing to save"


def test_commit_every_takes_numbers_only(spill: Spill, folder: Path) -> None:
    assert spill("build", folder, "--commit-every", "nan").code == 2
