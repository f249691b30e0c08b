"""The documents in the user's files, in pieces that are never large, so that neither file nor document is in memory."""

import gzip
import io
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from overspill.errors import OptionError

log = logging.getLogger("overspill")

SUFFIXES = (".txt", ".md", ".jsonl")
"""What is read of a folder, gzipped or not. A file that is named itself is text, whatever its name."""
ZIPPED = ".gz"
PIECE = 1 << 20
"""Characters, and then to the end of the line, so that no word is cut."""
CHAT = "messages"
TEXT = "text"


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of one document."""

    text: str
    first: bool = True
    last: bool = True
    templated: bool = False
    """Whether the text holds its special tokens already, as a chat template writes them."""


@dataclass(frozen=True, slots=True)
class Format:
    """How a line of JSON becomes text."""

    field: str | None = None
    """The field with the text; None: "text", or else the chat in "messages"."""
    chat: Callable[[list[Any]], str] | None = None
    """The tokenizer's chat template; None where it has none."""


def files_of(path: Path, name: str = "data") -> list[Path]:
    """The file, or all files of a folder that are text by their names, in an order of their names only."""
    if not path.exists():
        raise OptionError(
            f"expected --{name} to be a file or a folder, found nothing at {str(path)!r}; give the path of one"
        )
    if path.is_file():
        return [path]
    everything = sorted((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.relative_to(path).parts)
    visible = [p for p in everything if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    found = [p for p in visible if suffix(p) in SUFFIXES]
    if not found:
        raise OptionError(
            f"expected {', '.join(SUFFIXES)} files below --{name} {str(path)!r}, found {len(visible)} other files; "
            "give the folder with the texts, or one file"
        )
    if len(found) < len(visible):
        other = next(p for p in visible if p not in found)
        log.warning(
            "%d files below %s are not read, because they are not %s: %s%s",
            len(visible) - len(found),
            path,
            ", ".join(SUFFIXES),
            other.relative_to(path),
            ", ..." if len(visible) - len(found) > 1 else "",
        )
    return found


def suffix(path: Path) -> str:
    """The suffix of a file's name; of what is inside, where it is gzipped."""
    return (path.with_suffix("") if path.suffix.lower() == ZIPPED else path).suffix.lower()


def read_documents(files: Iterable[Path], how: Format) -> Iterator[Piece]:
    """All documents, each as one piece or several."""
    for path in files:
        if suffix(path) == ".json":
            raise OptionError(f"expected one JSON object per line in a .jsonl file, found {str(path)!r}; convert it")
        try:
            with _opened(path) as file:
                yield from _lines(path, file, how) if suffix(path) == ".jsonl" else _text(path, file)
        except (OSError, EOFError, zlib.error) as error:  # gzip raises all three for what is torn
            raise OptionError(
                f"expected a readable file, found {str(path)!r}: {error}; mend it, or take it away"
            ) from error


def _opened(path: Path) -> BinaryIO:
    return gzip.open(path) if path.suffix.lower() == ZIPPED else path.open("rb")  # type: ignore[return-value]


def _text(path: Path, file: BinaryIO) -> Iterator[Piece]:
    """A whole file is one document."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig")
    first = True
    try:
        piece = text.read(PIECE) + text.readline()
        while piece:
            following = text.read(PIECE) + text.readline()
            yield Piece(piece, first=first, last=not following)
            piece, first = following, False
    except UnicodeDecodeError as error:
        raise OptionError(_undecodable(str(path), error)) from error


def _lines(path: Path, file: BinaryIO, how: Format) -> Iterator[Piece]:
    for number, line in enumerate(file, start=1):
        where = f"line {number} of {str(path)!r}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            body = json.loads(text) if text.strip() else None
        except UnicodeDecodeError as error:
            raise OptionError(_undecodable(where, error)) from error
        except (json.JSONDecodeError, RecursionError) as error:
            raise OptionError(
                f"expected a JSON object in {where}, found {_short(text)}: {error}; write one object per line"
            ) from error
        if not text.strip():
            continue
        if not isinstance(body, dict):
            raise OptionError(f"expected a JSON object in {where}, found {_short(text)}; write one object per line")
        piece = _document(body, how, where)
        if piece.text:
            yield piece


def _document(body: dict[str, Any], how: Format, where: str) -> Piece:
    field = how.field or (CHAT if TEXT not in body and CHAT in body else TEXT)
    if field not in body:
        raise OptionError(
            f"expected a field {field!r} in {where}, found {', '.join(map(repr, body)) or 'no fields'}; name the one "
            "with the text: --text-field NAME"
        )
    value = body[field]
    if isinstance(value, str):
        return Piece(_encodable(value, where))
    if field == CHAT and isinstance(value, list):
        return Piece(_encodable(_chat(value, how, where), where), templated=True)
    raise OptionError(
        f"expected text in field {field!r} of {where}, found {type(value).__name__}; name the one with the text: "
        "--text-field NAME"
    )


def _encodable(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(
            f"expected text in {where}, found half a character ({error.object[error.start]!a}), as is left where "
            "an emoji was cut; mend or remove it"
        ) from error
    return text


def _chat(messages: list[Any], how: Format, where: str) -> str:
    from jinja2 import TemplateError  # torch brings it

    if how.chat is None:
        raise OptionError(
            f"expected a tokenizer with a chat template for the messages in {where}, found one without; give the "
            'model\'s chat_template.jinja, or write the conversations as "text"'
        )
    try:
        return how.chat(messages)
    except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise OptionError(
            f"expected messages in {where} that the tokenizer's chat template takes, such as "
            f'[{{"role": "user", "content": "..."}}, ...], found {_short(str(messages))}: {error}; write them so'
        ) from error


def _undecodable(where: str, error: UnicodeDecodeError) -> str:
    byte = error.object[error.start]
    return f"expected UTF-8 text in {where}, found the byte 0x{byte:02x} ({error.reason}); convert it to UTF-8"


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
