"""What a program prints: it is run as a script, without tests."""

from __future__ import annotations

from grail_lightning.programs.grade import line_of
from grail_lightning.programs.guest import encode
from grail_lightning.programs.sandbox import EndedError, Sandbox

_MAX_CHARACTERS = 4000  # As JSON at most 48,000 bytes.
_SCRIPT = f"""
import contextlib, io, traceback

class Full(BaseException):
    pass

class Text(io.StringIO):
    def write(self, text):
        room = {_MAX_CHARACTERS} - self.tell()
        super().write(text[:room])
        if len(text) > room:
            raise Full
        return len(text)

def run(code):
    text, last = Text(), ""
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            exec(compile(code, "<code>", "exec", dont_inherit=True), {{"__name__": "__main__"}})
    except Full:
        last = "… (cut)"
    except SystemExit:
        pass
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next
        last = "".join(traceback.format_exception(error, limit=-2, chain=False))
    return text.getvalue() + last[-{_MAX_CHARACTERS}:]
"""


def printed(sandbox: Sandbox, program: str) -> str:
    """What a program prints, and the end of its traceback; untrusted text of at most 8,000 characters.

    Of a program that exceeds a limit or ends its process nothing is told but that.

    Raises:
        LostError: The sandbox was lost, and nothing is known.
    """
    try:
        reply = sandbox.begin({"role": "solve", "program": _SCRIPT, "entry": "run"})
        if "ok" in reply:
            reply = sandbox.ask({"arguments": encode((program,))})
        sandbox.end()
    except EndedError as ended:
        return f"Error: {ended.status}: {line_of(ended)}"
    text = reply.get("ok")
    return text[: 2 * _MAX_CHARACTERS] if isinstance(text, str) else f"Error: {line_of(reply.get('message'))}"
