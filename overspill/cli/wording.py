"""What the library says, with its keywords as the command calls them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import typer

_QUOTED = r"""'[^']*'|"[^"]*\""""
_KEYWORD = re.compile(
    rf"(?<!\S)(?P<keyword>\w+)=(?P<value>(?:{_QUOTED})(?: or '\w+')*|\w+)?"
    r'|machine\["(?P<rate>\w+)"\]'
    # Found so that nothing in it is looked at.
    rf"|(?<!\w)(?:{_QUOTED})(?!\w)"
)


def options_of(app: typer.Typer, arguments: Sequence[str]) -> dict[str, str]:
    """The options of the command that is called with these arguments, by what its parameters are called."""
    command: Any = typer.main.get_command(app)
    for word in arguments:
        command = getattr(command, "commands", {}).get(word, command)
    return {param.name: param.opts[0] for param in command.params if param.opts[0].startswith("--")}


def as_options(text: str, options: Mapping[str, str]) -> str:
    """With --host for host=, --states exact for states='exact', and --machine-link for machine["link"], where the
    command has that option. What is quoted stays; and so does all where --ours takes keywords as they are."""
    if "ours" in options:
        return text

    def said(found: re.Match[str]) -> str:
        name = f"machine_{found['rate']}" if found["rate"] else found["keyword"]
        if name not in options:
            return found[0]
        value = re.sub("""['"]""", "", found["value"] or "")
        return f"{options[name]} {value}" if value else options[name]

    return _KEYWORD.sub(said, text)
