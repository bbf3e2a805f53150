"""Chat: the folder's template turns messages into a prompt. It is a stranger's program, and runs in a sandbox."""

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenformer.errors import UserError
from tokenformer.parsing import is_file, read_json, read_text, shown
from tokenformer.serve.protocol import Refused

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_template(folder: Path) -> Callable[[Any], str] | None:
    """Return the function that turns messages into a prompt, or None where the folder has no chat template."""
    settings = read_json(folder / "tokenizer_config.json") if is_file(folder / "tokenizer_config.json") else {}
    source, where = settings.get("chat_template"), f"{folder}/tokenizer_config.json"
    if is_file(folder / "chat_template.jinja"):
        source, where = read_text(folder / "chat_template.jinja"), f"{folder}/chat_template.jinja"
    if isinstance(source, list):  # several, by name
        source = next((t.get("template") for t in source if isinstance(t, dict) and t.get("name") == "default"), None)
    if source is None:
        return None
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def complain(message: object) -> None:
        raise Refused(f"the chat template refuses these messages: {str(message)[:300]}", "messages")

    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    jinja.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
    helpers: dict[str, Any] = {
        "raise_exception": complain,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    }
    jinja.globals.update(helpers)
    words = {name: _word(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    try:
        template = jinja.from_string(source)
    except (TemplateError, TypeError, AttributeError) as error:
        raise UserError(f"the chat template of {where} is not valid ({error}): mend or remove it") from None

    def render(messages: Any) -> str:
        try:
            return template.render(messages=check_messages(messages), add_generation_prompt=True, **words)
        except Refused:
            raise
        except Exception as error:  # whatever a template does with messages that it did not expect
            raise Refused(f"the chat template cannot read these messages ({str(error)[:200]})", "messages") from None

    return render


def _word(value: Any) -> str:
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages whose contents are text; parts of text are joined."""
    if not isinstance(messages, list) or not messages:
        raise Refused(f"messages is {shown(messages)}, but must be a list of messages", "messages")
    out = []
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise Refused(f"messages[{i}] has no role that we know: give one of {', '.join(ROLES)}", "messages")
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise Refused(f"the content of messages[{i}] is {shown(content)}, but must be text", "messages")
        out.append({**message, "role": role, "content": content})
    return out
