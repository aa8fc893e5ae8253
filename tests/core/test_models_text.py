"""A model's text side: end tokens, prompts, answers, decoding, and chat templates that are strange or hostile."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spill import models
from spill.errors import InputError, ModelError
from spill.models.text import Text
from spill.testing.models import tiny_model

NEWLINE = "\n"


def tick() -> None:
    pass


def never(line: str) -> None:
    raise AssertionError(f"said without need: {line}")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPILL_HOME", str(tmp_path / "home"))
    return tiny_model(tmp_path / "tiny")


def local(directory: Path) -> models.Model:
    model = models.resolve(str(directory), tick=tick, say=never)
    assert model is not None
    return model


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None takes a key out."""
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: v for key, v in value.items() if v is not None}))


# End tokens


def test_stop_ids_are_the_union_of_three_files(tiny: Path) -> None:
    edit(tiny / "generation_config.json", eos_token_id=[256, 65])
    edit(tiny / "config.json", eos_token_id=66)
    assert models.stop_ids(local(tiny)) == (65, 66, 256, 258)
    (tiny / "generation_config.json").unlink()
    edit(tiny / "config.json", eos_token_id=None)
    edit(tiny / "tokenizer_config.json", eos_token={"content": "<|endoftext|>", "lstrip": False})
    assert models.stop_ids(local(tiny)) == (256,)


def test_the_special_tokens_map_counts_where_the_tokenizers_config_is_silent(tiny: Path) -> None:
    (tiny / "generation_config.json").unlink()
    edit(tiny / "config.json", eos_token_id=None)
    edit(tiny / "tokenizer_config.json", eos_token=None)
    (tiny / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert models.stop_ids(local(tiny)) == (258,)


@pytest.mark.parametrize("value", ["2", [2, "3"], True, -1, 2.0, [[2]], 2**31])
def test_an_end_token_that_is_no_number_is_refused(tiny: Path, value: Any) -> None:
    edit(tiny / "config.json", eos_token_id=value)
    with pytest.raises(ModelError, match="eos_token_id"):
        models.stop_ids(local(tiny))


def test_a_model_without_an_end_is_refused(tiny: Path) -> None:
    (tiny / "generation_config.json").unlink()
    edit(tiny / "config.json", eos_token_id=None)
    edit(tiny / "tokenizer_config.json", eos_token="<nowhere>")
    with pytest.raises(ModelError, match="<nowhere>"):
        models.stop_ids(local(tiny))
    edit(tiny / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ModelError, match="names no end token"):
        models.stop_ids(local(tiny))


# Tokenizer and template


def text_of(directory: Path) -> Text:
    return Text.load(directory, models.stop_ids(local(directory)))


def set_template(directory: Path, template: Any) -> Text:
    edit(directory / "tokenizer_config.json", chat_template=template)
    return text_of(directory)


def ids(text: str) -> list[int]:
    """Token ids of a tiny model: bytes, with the three special tokens in angle brackets."""
    found: list[int] = []
    while text:
        for number, special in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>")):
            if text.startswith(special):
                found.append(256 + number)
                text = text.removeprefix(special)
                break
        else:
            found.extend(text[0].encode())
            text = text[1:]
    return found


def test_a_prompt_is_the_template_up_to_the_answer(tiny: Path) -> None:
    text = text_of(tiny)
    prompt = text.prompt("Où est 東京?", "Be brief.")
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOù est 東京?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.dtype == np.int32
    assert prompt.tolist() == ids(expected)
    assert text.prompt("x").tolist() == ids("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n")


def test_an_answer_ends_with_exactly_one_end_token(tiny: Path) -> None:
    text = text_of(tiny)
    assert text.stop_ids == (256, 258)
    assert text.end_id == 258
    answer = text.answer("Paris")
    assert answer.dtype == np.int32
    assert answer.tolist() == [*b"Paris", 258]
    assert text.answer("").tolist() == [258]


def test_the_text_of_a_special_token_in_an_answer_is_only_text(tiny: Path) -> None:
    text = text_of(tiny)
    answer = text.answer("say <|im_end|> twice<|im_end|>")
    assert [token for token in answer.tolist() if token in text.stop_ids] == [258]
    assert text.decode(answer) == "say <|im_end|> twice<|im_end|>"


def test_an_answer_that_must_hold_an_end_token_is_refused(tiny: Path) -> None:
    edit(tiny / "generation_config.json", eos_token_id=ord("!"))
    text = text_of(tiny)
    assert text.answer("fine.").tolist()[-1] == 258
    with pytest.raises(InputError, match="end token"):
        text.answer("no!")


def test_decoding_skips_special_tokens_and_unknown_numbers(tiny: Path) -> None:
    text = text_of(tiny)
    tokens = np.array([257, *"né 東".encode(), 258, 99_999, 256], dtype=np.int32)
    assert text.decode(tokens) == "né 東"
    assert text.decode([]) == ""


def test_a_beginning_token_is_never_doubled(tiny: Path) -> None:
    adds_one = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}},
    }
    edit(tiny / "tokenizer.json", post_processor=adds_one)
    edit(tiny / "tokenizer_config.json", bos_token="<|endoftext|>")
    text = set_template(tiny, "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    assert text.prompt("x").tolist() == ids("<|endoftext|>x<|im_end|>")
    assert text.answer("y").tolist() == [ord("y"), 258]


def test_truncation_and_padding_saved_with_a_tokenizer_are_switched_off(tiny: Path) -> None:
    edit(
        tiny / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 258,
            "pad_type_id": 0,
            "pad_token": "<|im_end|>",
        },
    )
    assert text_of(tiny).answer("a longer answer").tolist() == [*b"a longer answer", 258]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}[{{ m.content }}]<|endoftext|>{% endfor %}", 256),
        ("{% for m in messages %}{{ m.content }}\n<|im_end|><|endoftext|>{% endfor %}", 258),
        ("{% for m in messages %}<|endoftext|>{{ m.content }}{% endfor %}", 258),  # none after it: the tokenizer's
        ("{{ messages[0].content }}<|endoftext|>", 258),  # drops the answer
    ],
)
def test_the_end_token_is_the_first_that_the_template_puts_after_an_answer(tiny: Path, template: str, end: int) -> None:
    assert set_template(tiny, template).end_id == end


def test_without_an_end_in_template_and_tokenizer_the_lowest_counts(tiny: Path) -> None:
    edit(tiny / "tokenizer_config.json", eos_token=None)
    assert set_template(tiny, "{{ messages[0].content }}").end_id == 256


def test_a_template_file_goes_before_the_config_and_a_list_has_a_default(tiny: Path) -> None:
    templates = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "D{{ messages[-1].content }}"},
    ]
    assert text_of_prompt(set_template(tiny, templates), "x") == "Dx"
    (tiny / "chat_template.jinja").write_text("F{{ messages[-1].content }}é", encoding="utf-8")
    assert text_of_prompt(text_of(tiny), "x") == "Fxé"


def text_of_prompt(text: Text, user: str, system: str = "") -> str:
    return bytes(text.prompt(user, system).tolist()).decode()


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}no clock{% endif %}", "no clock"),
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'ü<': messages[0].content} | tojson }}", '{"ü<": "x"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% generation %}g{{ messages[0].content }}{% endgeneration %}", "gx"),
        (
            "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ pad_token }}|{{ unk_token }}",
            "TrueTrueTrue|",
        ),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
    ],
)
def test_templates_see_what_the_hub_promises_them(tiny: Path, template: str, prompt: str) -> None:
    edit(tiny / "tokenizer_config.json", pad_token="")
    assert text_of_prompt(set_template(tiny, template), "x") == prompt


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('only\nalternating roles') }}", "only alternating roles"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ strftime_now('%d') }}", "strftime_now"),
        ("{{ range(10000000) | list }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% if %}", "cannot be read"),
        ("{{ messages | random }}", "No filter named 'random'"),
        ("{{ lipsum() }}", "lipsum"),
        ("{{ 1 / 0 }}", "division"),
        ("{% include 'x' %}", "loader"),
        (None, "no chat template"),
        (7, "no chat template"),
        ([{"name": "tool_use", "template": "x"}], "no chat template"),
    ],
)
def test_a_template_that_fails_is_one_line(tiny: Path, template: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        set_template(tiny, template).prompt("x")
    assert NEWLINE not in str(caught.value)


def test_a_refused_system_message_is_an_error_of_the_prompt_alone(tiny: Path) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}ok"
    text = set_template(tiny, refuses)
    assert text_of_prompt(text, "x") == "ok"
    with pytest.raises(ModelError, match="no system role"):
        text.prompt("x", "Be brief.")


def test_half_a_surrogate_pair_is_an_input_error(tiny: Path) -> None:
    text = text_of(tiny)
    for call in (text.prompt, text.answer):
        with pytest.raises(InputError, match=r"\\ud800.*not Unicode"):
            call("a\ud800")


def test_a_broken_tokenizer_is_one_line(tiny: Path) -> None:
    model = local(tiny)
    (tiny / "tokenizer.json").write_text('{"model": {"type": "?"}}')
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read") as caught:
        models.stop_ids(model)
    assert NEWLINE not in str(caught.value)
