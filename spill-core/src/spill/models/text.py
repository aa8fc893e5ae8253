"""A model's text side: tokenizer, chat template and end tokens, with no torch and no transformers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from attrs import frozen
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from spill.engine import Int32
from spill.errors import InputError, ModelError
from spill.models.directory import Model, read_object
from spill.records import printable

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def stop_ids(model: Model) -> tuple[int, ...]:
    """Every token that ends an answer, ascending: the union of what generation_config.json and config.json name as
    `eos_token_id` (a number or a list) and the id of the tokenizer's `eos_token`.

    Raises:
        ModelError: no file names one, or one of them is no token of this model's tokenizer.
    """
    directory = model.directory
    generation = read_object(directory / "generation_config.json") if _has(directory, "generation_config.json") else {}
    found = {
        number for source in (generation, model.config) for number in _numbers(source.get("eos_token_id"), directory)
    }
    tokenizer = load_tokenizer(directory)
    named = special_tokens(directory).get("eos_token")
    if named is not None:
        number = tokenizer.token_to_id(named)
        if number is None:
            raise ModelError(f"{directory}: the eos_token {printable(named)!r} is not in tokenizer.json")
        found.add(number)
    if not found:
        raise ModelError(f"{directory} names no end token: set eos_token_id in generation_config.json")
    return tuple(sorted(found))


def _numbers(value: Any, directory: Path) -> list[int]:
    listed: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(number) is int and 0 <= number < 2**31 for number in listed):
        raise ModelError(f"{directory}: eos_token_id is {printable(repr(value))}, not a token id or a list of them")
    return listed


def _has(directory: Path, name: str) -> bool:
    return (directory / name).is_file()


def load_tokenizer(directory: Path) -> Tokenizer:
    """tokenizer.json, with any truncation or padding that was saved in it switched off.

    Raises:
        ModelError: it cannot be read.
    """
    path = directory / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"{path} cannot be read as a tokenizer: {printable(str(error))}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def special_tokens(directory: Path) -> dict[str, str]:
    """`bos_token`, `eos_token` ... as text, from tokenizer_config.json, else from special_tokens_map.json."""
    tokens: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in (read_object(directory / name) if _has(directory, name) else {}).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key in SPECIAL and isinstance(text, str):
                tokens[key] = text
    return tokens


class Text:
    """Turns instructions and questions into prompts, answers into tokens, and tokens into text.

    Prompts and answers are encoded apart, so a row's prompt in the tune is token for token the prompt of the exam.

    Attributes:
        stop_ids: the tokens that end an answer, ascending.
        end_id: the one that `answer` puts at the end: the first stop id after an answer in the rendered template,
            else the tokenizer's `eos_token`, else the lowest of `stop_ids`.
    """

    def __init__(self, tokenizer: Tokenizer, answers: Tokenizer, template: "ChatTemplate", stop: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._answers = answers
        self._template = template
        self.stop_ids = tuple(sorted(stop))
        self.end_id = self._find_end()

    @classmethod
    def load(cls, model_directory: Path, stop: tuple[int, ...]) -> "Text":
        """Read tokenizer and template of a model directory; `stop` is what `spill.models.stop_ids` answers.

        Raises:
            ModelError: the tokenizer or the template is missing, malformed or refuses a plain conversation.
        """
        answers = load_tokenizer(model_directory)
        # In an answer the text of a special token is only text, so that its end is marked once, at the end.
        answers.encode_special_tokens = True
        return cls(load_tokenizer(model_directory), answers, ChatTemplate.load(model_directory), stop)

    def prompt(self, user: str, system: str = "") -> Int32:
        """int32 (n,): the template up to where the answer begins. Without `system` the template's own default holds.

        Nothing is added around what the template writes, so its beginning token is never doubled.

        Raises:
            ModelError: the template fails, or refuses these messages.
            InputError: the messages are not Unicode text.
        """
        for asked in (user, system):
            _require_unicode(asked)
        messages = [{"role": "user", "content": user}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        rendered = self._template.render(messages, add_generation_prompt=True)
        return np.array(_encode(self._tokenizer, rendered), dtype=np.int32)

    def answer(self, text: str) -> Int32:
        """int32 (m + 1,): the answer's tokens and exactly one end token.

        Raises:
            InputError: the answer itself would be read as an end token, or is not Unicode text.
        """
        ids = _encode(self._answers, text)
        if set(ids) & set(self.stop_ids):
            raise InputError(f"the answer {printable(text, 60)!r} holds an end token of this model; take it out")
        return np.array([*ids, self.end_id], dtype=np.int32)

    def decode(self, tokens: Sequence[int] | Int32) -> str:
        """The text of tokens; special tokens, and numbers that are no token, are skipped."""
        return str(self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True))

    def _find_end(self) -> int:
        said = "Paris"
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
        _, found, after = self._template.render(messages, add_generation_prompt=False).rpartition(said)
        for token in _encode(self._tokenizer, after if found else ""):
            if token in self.stop_ids:
                return token
        named = self._tokenizer.token_to_id(self._template.tokens.get("eos_token", ""))
        return named if named in self.stop_ids else self.stop_ids[0]


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell, or a byte that is no UTF-8
        raise InputError(f"{printable(ascii(text), 60)} is not Unicode text: {error.reason}") from None


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    _require_unicode(text)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@frozen(kw_only=True, eq=False)
class ChatTemplate:
    """A model's chat template, compiled, and the special tokens that it may name."""

    compiled: Template
    tokens: Mapping[str, str]
    directory: Path

    @classmethod
    def load(cls, directory: Path) -> "ChatTemplate":
        """chat_template.jinja, else `chat_template` of tokenizer_config.json: a text, or a list with a `default`.

        The environment is the one that the hub's templates are written for, but sandboxed, and without a clock
        (`strftime_now` is undefined) or chance, so that a prompt is the same on every day.

        Raises:
            ModelError: there is none, or it does not parse.
        """
        source: object = None
        try:
            if _has(directory, "chat_template.jinja"):
                source = (directory / "chat_template.jinja").read_text(encoding="utf-8")
            elif _has(directory, "tokenizer_config.json"):
                source = read_object(directory / "tokenizer_config.json").get("chat_template")
            if isinstance(source, list):
                named = [t for t in source if isinstance(t, dict) and t.get("name") == "default"]
                source = named[0].get("template") if named else None
            if not isinstance(source, str):
                raise ModelError(f"{directory} has no chat template; choose an instruction-tuned model (…-Instruct)")
            compiled = _environment().from_string(source)
        except (OSError, ValueError, RecursionError, TemplateError) as error:
            raise ModelError(f"the chat template of {directory} cannot be read: {_line(error)}") from error
        return cls(compiled=compiled, tokens=special_tokens(directory), directory=directory)

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """The conversation as the model expects it.

        Raises:
            ModelError: the template fails, or refuses these messages.
        """
        try:
            return self.compiled.render(
                messages=[dict(m) for m in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.tokens,
            )
        except Exception as error:  # a template is foreign code: it may raise anything
            raise ModelError(f"the chat template of {self.directory} refused: {_line(error)}") from error


def _line(error: Exception) -> str:
    return printable(" ".join(str(error).split()) or type(error).__name__)


class _Generation(Extension):
    """Accepts the `{% generation %}` mark around answers, which says nothing here."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it like this

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    del environment.globals["lipsum"], environment.filters["random"]
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **settings: Any) -> str:
    # jinja2's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **settings)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
